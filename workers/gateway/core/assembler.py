"""Interface of assemblers, which turn token logs into the answers of an endpoint. Pure.

An assembler gets the records of its request's logs, each once and in order, and depends on nothing
else. Given the same records again, in another process or years later, it produces the same output.
This is how a stream resumes at another gateway.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Generic, TypeVar

import msgspec
from msgspec import UNSET, Struct, UnsetType

from shared.protocol.records import AnyRecord, TokenChunk

TokenBytes = Mapping[int, bytes]
"""Bytes of tokens, by token id."""


PROMPT_FIELDS = ("messages", "prompt", "prompt_token_ids", "tokens")
"""Fields of a request on the bus that errors of its text name."""

# Options that may differ between requests of one id, because they change the delivery alone.
_DELIVERY = frozenset({"stream", "include_usage", "continuous_usage", "prompt_tokens"})


class OutputOptions(Struct, frozen=True, kw_only=True):
    """Options of an output besides the text."""

    output: str
    """Name of the output."""
    format: str


class AnswerOptions(Struct, frozen=True, kw_only=True):
    """Base class of the options of an answer, which are stored in the RequestRecord.

    A field is stored unless it is UNSET. Digests depend on the order of the fields.
    """

    @property
    def parts(self) -> int:
        """Number of prompts."""
        return 1

    @property
    def fields(self) -> Mapping[str, str]:
        """Client's names of fields that this request has renamed, by their names on the bus."""
        return {}

    @property
    def part_fields(self) -> Sequence[str]:
        """Client's field of each part's text; empty if all texts are from the same field."""
        return ()

    @property
    def output(self) -> OutputOptions | None:
        """Options of the output besides the text that belongs to the answer."""
        return None

    @property
    def logprobs(self) -> int | None:
        """Whether the answer has log probabilities, or of how many other tokens; None for none."""
        return None

    @property
    def echo(self) -> Any:
        """Prompts with which the choices begin."""
        return ()

    @property
    def num_logs(self) -> int:
        """Number of logs: one for each part, and one for an output besides the text."""
        return self.parts + (self.output is not None)

    def fields_of(self, part: int | None) -> Mapping[str, str]:
        """Return `fields`, with the field that the text of one part is from."""
        if part is None or not self.part_fields:
            return self.fields
        return dict.fromkeys(PROMPT_FIELDS, self.part_fields[part])

    def digest_part(self) -> dict[str, Any]:
        """Return the options that are part of a request's digest.

        Only the format of an output is: the rest is configured, or in the request on the bus.
        """
        stored: dict[str, Any] = msgspec.to_builtins(self)
        part = {name: value for name, value in stored.items() if name not in _DELIVERY}
        for name in part:
            if isinstance(getattr(self, name), OutputOptions):
                part[name] = {"format": part[name]["format"]}
        return part


Options = TypeVar("Options", bound=AnswerOptions)


class Answering(Struct, Generic[Options], frozen=True):
    """A request that is being answered."""

    request_id: str
    model: str
    created_s: int
    options: Options
    token_bytes: TokenBytes = {}


class Assembler(ABC, Generic[Options]):
    """Assembles one answer. A request with several prompts has several logs, its parts."""

    collects_answer = True
    """False when `answer` will not be called. Log probabilities are then dropped after they have
    been shown, because there may be gigabytes of them."""
    max_events = 1
    """Limit on the events of one record."""
    sample_bytes = 0
    """Memory that the answer needs for each sample of its speech."""
    prompt_token_ids: Sequence[int] = ()
    """Prompt tokens whose bytes are needed. No record contains them."""

    def __init__(self, request: Answering[Options]) -> None:
        self.request = request
        self.options = request.options

    @abstractmethod
    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        """Add a record, and return the events of a stream that show it.

        `file` is the file that `file_of` names, in base64. Errors of outputs in a Finish have the
        client's fields.
        """

    def file_of(self, record: AnyRecord) -> str:
        """Return the `media:` URL of the file that `add` needs with a record; "" for none."""
        return ""

    def abort(self) -> list[Any] | None:
        """Return the events that a stream shows when the request is cancelled.

        None: a cancelled request has no answer.
        """
        return None

    @abstractmethod
    def answer(self) -> Any:
        """Return the whole answer, after all parts have finished."""


def token_ids_to_decode(record: TokenChunk) -> set[int]:
    """Return the token ids whose bytes are needed to show the record's log probabilities."""
    found: set[int] = set()
    for delta in record.choices:
        if delta.logprobs is not None:
            found.update(delta.token_ids)
            for logprobs in delta.logprobs:
                found.update(logprobs.top_token_ids)
    for logprobs in record.prompt_logprobs or []:
        found.update(logprobs.top_token_ids)
    return found


def or_unset(value: str | int | None) -> str | int | UnsetType:
    return UNSET if value is None else value
