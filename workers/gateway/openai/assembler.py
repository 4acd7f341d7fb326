"""Common part of the assemblers of OpenAI's API. Pure."""

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Self, TypeVar

import msgspec
from msgspec import UNSET, Struct

from shared.protocol.messages import RequestRecord
from shared.protocol.records import ChoiceDelta, TokenChunk, Usage
from workers.gateway.core.assembler import Assembler, TokenBytes
from workers.gateway.schemas.openai_response import FinishReason, MaybeUsage, usage_of


class AnswerOptions(Struct, frozen=True, kw_only=True):
    """Options of the answer, stored in the RequestRecord."""

    parts: int = 1
    include_usage: bool = False
    continuous_usage: bool = False
    prompt_tokens: int = 0
    """Set for `continuous_usage` only."""
    logprobs: bool = False


@dataclass(slots=True, kw_only=True)
class ChoiceSoFar:
    """One choice so far."""

    begun: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


Options = TypeVar("Options", bound=AnswerOptions)
Choice = TypeVar("Choice", bound=ChoiceSoFar)


@dataclass(eq=False)
class OpenAIAssembler(Assembler, Generic[Options, Choice]):
    """Assembler whose chunks and whole answers have the same head, and lists of choices."""

    options_type: ClassVar[type[AnswerOptions]]
    chunk_type: ClassVar[type[Any]]
    answer_type: ClassVar[type[Any]]

    request_id: str
    model: str
    created_s: int
    options: Options
    token_bytes: TokenBytes
    choices: dict[int, Choice] = field(default_factory=dict)
    usages: list[Usage] = field(default_factory=list)
    num_tokens: int = 0
    audio_tokens: int | None = None
    """Tokens of the speech; None for an answer that is not spoken."""

    @classmethod
    def of_record(cls, request_id: str, record: RequestRecord, token_bytes: TokenBytes) -> Self:
        options: Any = msgspec.convert(record.options, cls.options_type)
        return cls(request_id, record.model, record.created_s, options, token_bytes)

    def add(self, part: int, record: TokenChunk) -> list[Any]:
        self.num_tokens += sum(len(delta.token_ids) for delta in record.choices)
        advanced = [self._advance(part, delta) for delta in record.choices]
        shown = [choice for choice in advanced if choice is not None]
        return [self._chunk(shown)] if shown else []

    def _chunk(self, shown: list[Any]) -> Any:
        usage: MaybeUsage = UNSET
        if self.options.continuous_usage:
            usage = usage_of([Usage(self.options.prompt_tokens, self.num_tokens)])
        elif self.options.include_usage:
            usage = None
        return self._message(self.chunk_type, shown, usage)

    def finish(self, part: int, usage: Usage) -> list[Any]:
        self.usages.append(usage)
        wanted = self.options.include_usage or self.options.continuous_usage
        if not wanted or len(self.usages) < self.options.parts:
            return []
        return [self._message(self.chunk_type, [], usage_of(self.usages, self.audio_tokens))]

    def answer(self) -> Any:
        choices = [self._whole(index, choice) for index, choice in sorted(self.choices.items())]
        return self._message(self.answer_type, choices, usage_of(self.usages, self.audio_tokens))

    def _message(self, message_type: type[Any], choices: list[Any], usage: MaybeUsage) -> Any:
        return message_type(self.request_id, self.created_s, self.model, choices, usage=usage)

    @abstractmethod
    def _advance(self, part: int, delta: ChoiceDelta) -> Any | None:
        """Add to a choice. Return what a chunk shows of it, or None for nothing."""

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> Any:
        """Return a choice of the whole answer."""
