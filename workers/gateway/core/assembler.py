"""Interface of assemblers, which turn token logs into the answers of an endpoint. Pure.

An assembler gets the records of its request's logs, each once and in order, and depends on nothing
else. Given the same records again, in another process or years later, it produces the same output.
This is how a stream resumes at another gateway.
"""

from typing import Any, Protocol, runtime_checkable

from msgspec import UNSET, UnsetType

from shared.protocol.records import TokenChunk, Usage


class TokenBytes(Protocol):
    """Bytes of tokens, by token id."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


class Assembler(Protocol):
    """Assembles one answer. A request with several prompts has several logs, its parts."""

    collects_answer: bool
    """False when `answer` will not be called. Log probabilities are then dropped after they have
    been shown, because there may be gigabytes of them."""

    def add(self, part: int, record: TokenChunk) -> Any | None:
        """Return what a stream shows of a record: an event, Events, or None for nothing."""

    def finish(self, part: int, usage: Usage) -> Any | None:
        """Return what a stream shows when a part has ended, like `add`."""

    def answer(self) -> Any:
        """Return the whole answer, after all parts have finished."""


class Events(list[Any]):
    """Several events of one record."""


@runtime_checkable
class MultiEventAssembler(Protocol):
    """An assembler that may show a record as several events."""

    max_events: int
    """Limit on the events of one record."""


@runtime_checkable
class AbortableAssembler(Protocol):
    """An assembler that answers a cancelled request with what was generated before."""

    def abort(self) -> Any | None:
        """Return what a stream shows when the request is cancelled."""


@runtime_checkable
class PromptAssembler(Protocol):
    """An assembler that needs the bytes of prompt tokens, which no record contains."""

    prompt_token_ids: list[int]


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
