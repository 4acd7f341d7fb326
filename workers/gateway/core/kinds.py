"""Kinds of answers: one declaration for each kind of request that the gateway records. Pure."""

from collections.abc import Callable
from typing import Any, Generic

import msgspec
from msgspec import Struct

from shared.errors import DecodeError
from shared.protocol.messages import RequestRecord
from workers.gateway.core.assembler import Answering, Assembler, Options
from workers.gateway.core.field_names import ClientFields
from workers.gateway.core.order import Records, in_arrival_order


class Refusal(Struct, frozen=True):
    """Refusal of an answer that would take too much memory as a whole."""

    content: str
    """Name of the part of the answer that is too large."""
    field: str
    """The field of the request that makes it large, by its name on the bus."""
    advice: str


class Budget(Struct, frozen=True):
    """Refusals of whole answers of one kind, by the reason for their size."""

    tokens: Refusal = Refusal(
        "log probabilities",
        "max_tokens",
        "ask for fewer, or for fewer tokens; a stream has no limit",
    )
    prompts: Refusal = Refusal(
        "log probabilities", "logprobs", "ask for fewer, or for fewer tokens; a stream has no limit"
    )
    output: Refusal = Refusal("speech", "stream", "a stream has no limit")


def unnamed(event: Any) -> str:
    return ""


class AnswerKind(Struct, Generic[Options], frozen=True, kw_only=True):
    """A kind of answer, such as a chat completion or a speech."""

    name: str
    """Name in RequestRecords. Neither it nor `id_prefix` ever changes."""
    id_prefix: str
    options: type[Options]
    assembler: Callable[[Answering[Options]], Assembler[Options]]
    client_fields: ClientFields = ClientFields()
    order: Callable[[Options, Records], Records] = in_arrival_order
    """Order in which the records of all logs are added to the answer."""
    budget: Budget = Budget()
    event_name: Callable[[Any], str] = unnamed
    """Returns the name of an event of a stream; "" for none."""

    def fields_of(self, options: Options, part: int | None = None) -> ClientFields:
        """Return the client's names of fields, for errors of one part or of the whole request."""
        return self.client_fields.renamed(options.fields_of(part))

    def read_options(self, record: RequestRecord) -> Options:
        """Raises DecodeError for a record that another version of the gateway has written."""
        try:
            return msgspec.convert(record.options, self.options)
        except msgspec.ValidationError as error:
            raise DecodeError(
                f"the stored options of the request cannot be read: {error}"
            ) from error
