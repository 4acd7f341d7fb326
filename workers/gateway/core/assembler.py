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

from shared.protocol.records import AnyRecord, AudioChunk, TokenChunk

TokenBytes = Mapping[int, bytes]
"""Bytes of tokens, by token id."""
# Peak memory, in bytes, for one base64 character of an image and its JSON.
ENCODED_BYTES = 3

PROMPT_FIELDS = ("messages", "prompt", "prompt_token_ids", "tokens")
"""Fields of a request on the bus that contain its text. Errors in the text name one of them."""

# Options of the delivery. Requests with the same id may differ in them, because they do not change
# the answer.
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
        """The client's name of each bus field whose name depends on the request."""
        return {}

    @property
    def part_fields(self) -> Sequence[str]:
        """The client's field of each part's text; empty if all texts come from one field."""
        return ()

    @property
    def output(self) -> OutputOptions | None:
        """Options of the output besides the text, such as speech; None for text alone."""
        return None

    @property
    def logprobs(self) -> int | None:
        """Whether the answer shows log probabilities.

        A number means yes, and is the number of alternatives to each token. None means no.
        """
        return None

    @property
    def echo(self) -> Any:
        """Prompts that choices repeat at their beginning; empty if they do not."""
        return ()

    @property
    def num_logs(self) -> int:
        """Number of logs: one for each part, and one for an output besides the text."""
        return self.parts + (self.output is not None)

    def fields_of(self, part: int | None) -> Mapping[str, str]:
        """Return the client's names of fields for one part, or for the whole request."""
        if part is None or not self.part_fields:
            return self.fields
        return dict.fromkeys(PROMPT_FIELDS, self.part_fields[part])

    def digest_part(self) -> dict[str, Any]:
        """Return the options that are part of a request's digest.

        Only the format of an output is part of it. The other options of an output are configured,
        or are in the request on the bus.
        """
        options: dict[str, Any] = msgspec.to_builtins(self)
        part = {name: value for name, value in options.items() if name not in _DELIVERY}
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
    """False when `answer` will not be called. Log probabilities are then dropped with their
    event, because there may be gigabytes of them."""
    max_events = 1
    """Largest number of events for one record."""
    sample_bytes = 0
    """Memory that the answer needs for each sample of its speech."""
    prompt_token_ids: Sequence[int] = ()
    """Tokens of the prompt that the answer shows as text. No record names them, so their bytes are
    loaded separately."""

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

    def token_ids_of(self, record: TokenChunk) -> set[int]:
        """Return the ids of the tokens whose bytes `add` needs with a record."""
        token_ids = token_ids_to_decode(record)
        return token_ids.union(self.prompt_token_ids) if record.index == 0 else token_ids

    def num_bytes_of(self, record: AnyRecord, file: str) -> int:
        """Return the memory for a record and its file in a whole answer, if it is not reserved."""
        if isinstance(record, AudioChunk):
            return self.sample_bytes * record.num_samples
        return ENCODED_BYTES * len(file)

    def abort(self) -> list[Any] | None:
        """Return the last events of a stream when its request is cancelled.

        None: the stream, and an answer as a whole, end with an error instead.
        """
        return None

    @abstractmethod
    def answer(self) -> Any:
        """Return the whole answer, after all parts have finished."""


def token_ids_to_decode(record: TokenChunk) -> set[int]:
    """Return the ids of all tokens in a record's log probabilities, which are shown as text."""
    token_ids: set[int] = set()
    for delta in record.choices:
        if delta.logprobs is not None:
            token_ids.update(delta.token_ids)
            for logprobs in delta.logprobs:
                token_ids.update(logprobs.top_token_ids)
    for logprobs in record.prompt_logprobs or []:
        token_ids.update(logprobs.top_token_ids)
    return token_ids


def or_unset(value: str | int | None) -> str | int | UnsetType:
    return UNSET if value is None else value
