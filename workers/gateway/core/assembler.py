"""Interface of assemblers, which turn token logs into the answers of an endpoint. Pure.

An assembler gets the records of its request's logs, each once and in order, and depends on nothing
else. Given the same records again, in another process or years later, it produces the same output.
This is how a stream resumes at another gateway.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

from msgspec import UNSET, UnsetType

from shared.protocol.records import (
    AudioChunk,
    ImageRecord,
    OutputEnd,
    OutputSummary,
    StepState,
    TokenChunk,
    Usage,
)

TokenBytes = Mapping[int, bytes]
"""Bytes of tokens, by token id."""


class Assembler(ABC):
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

    @abstractmethod
    def add(self, part: int, record: TokenChunk) -> list[Any]:
        """Return the events that a stream shows of a record."""

    @abstractmethod
    def finish(self, part: int, usage: Usage) -> list[Any]:
        """Return the events that a stream shows when a part has ended."""

    def add_audio(self, record: AudioChunk | OutputEnd) -> list[Any]:
        """Return the events that a stream shows of a record of the speech."""
        return []

    def file_of(self, record: StepState | ImageRecord) -> str:
        """Return the `media:` URL of the file that is shown of an image; "" for none."""
        return ""

    def add_image(self, record: StepState | ImageRecord, file: str) -> list[Any]:
        """Return the events that a stream shows of an image; `file` is base64, or "" for none."""
        return []

    def event_name(self, event: Any) -> str:
        """Return the name of an event of a stream; "" for none."""
        return ""

    def end_outputs(self, outputs: Mapping[str, OutputSummary]) -> list[Any]:
        """Return the events that a stream shows when all outputs beside the text have ended.

        They come before those of `finish`.
        """
        return []

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
