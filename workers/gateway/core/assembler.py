"""From token logs to answers, for any endpoint: what its assembler must do. Pure.

An assembler is given the records of its request's logs, each once and in order, and is then what
they make together. It knows nothing else, so one that is given the same records again, in another
process or after years, says the same: that is how a stream goes on elsewhere.
"""

from collections.abc import Iterator
from typing import Any, Protocol, runtime_checkable

from msgspec import UNSET, UnsetType

from shared.protocol.messages import TokenChunk, TokenLogprobs, Usage
from workers.gateway.schemas.openai_response import TokenLogprob, TopLogprob


class TokenBytes(Protocol):
    """The bytes of tokens that have been learnt."""

    def __getitem__(self, token_id: int, /) -> bytes: ...


class Assembler(Protocol):
    """A request may be several on the bus, one for each prompt: its parts."""

    collects_answer: bool
    """Whether `answer` will be asked for. If not, log probabilities go as soon as they are shown:
    there may be gigabytes of them."""

    def add(self, part: int, record: TokenChunk) -> Any | None:
        """What a stream shows of it; None for nothing, and an Events for more than one event."""

    def finish(self, part: int, usage: Usage) -> Any | None:
        """The same of the end of a part."""

    def answer(self) -> Any:
        """The whole, when all parts have finished."""


class Events(list[Any]):
    """Several events of one record."""


@runtime_checkable
class MultiEventAssembler(Protocol):
    """An assembler that shows a record as several events."""

    max_events: int
    """Of one record."""


@runtime_checkable
class AbortableAssembler(Protocol):
    """An assembler whose answer, when the request is cancelled, is what there was by then."""

    def abort(self) -> Any | None:
        """What a stream shows of that."""


@runtime_checkable
class PromptAssembler(Protocol):
    """An assembler that needs the bytes of tokens which no record names."""

    prompt_token_ids: list[int]


def token_ids_to_decode(record: TokenChunk) -> set[int]:
    """Those that log probabilities name."""
    found: set[int] = set()
    for delta in record.choices:
        if delta.logprobs is not None:
            found.update(delta.token_ids)
            for logprobs in delta.logprobs:
                found.update(logprobs.top_token_ids)
    for logprobs in record.prompt_logprobs or []:
        found.update(logprobs.top_token_ids)
    return found


def openai_logprobs(
    token_ids: list[int], logprobs: list[TokenLogprobs], spelling: TokenBytes
) -> Iterator[TokenLogprob]:
    for token_id, known in zip(token_ids, logprobs, strict=True):
        pairs = zip(known.top_token_ids, known.top_logprobs, strict=True)
        tops = [TopLogprob(*_text(spelling[top], logprob)) for top, logprob in pairs]
        yield TokenLogprob(*_text(spelling[token_id], known.logprob), tops)


def _text(token: bytes, logprob: float) -> tuple[str, float, list[int]]:
    return token.decode("utf-8", "replace"), logprob, list(token)


def or_unset(value: str | int | None) -> str | int | UnsetType:
    return UNSET if value is None else value
