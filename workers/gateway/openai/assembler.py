"""Common part of the assemblers of OpenAI's API. Pure."""

from abc import abstractmethod
from dataclasses import dataclass
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


class OpenAIAssembler(Assembler, Generic[Options, Choice]):
    """Assembler whose chunks and whole answers have the same head, and lists of choices."""

    options_type: ClassVar[type[AnswerOptions]]
    chunk_type: ClassVar[type[Any]]
    answer_type: ClassVar[type[Any]]

    def __init__(
        self,
        request_id: str,
        model: str,
        created_s: int,
        options: Options,
        token_bytes: TokenBytes,
    ) -> None:
        self._id = request_id
        self._head = request_id, created_s, model
        self._options = options
        self._token_bytes = token_bytes
        self._choices: dict[int, Choice] = {}
        self._num_tokens = 0
        self._usages: list[Usage] = []

    @classmethod
    def of_record(cls, request_id: str, record: RequestRecord, token_bytes: TokenBytes) -> Self:
        options: Any = msgspec.convert(record.options, cls.options_type)
        return cls(request_id, record.model, record.created_s, options, token_bytes)

    def add(self, part: int, record: TokenChunk) -> list[Any]:
        self._num_tokens += sum(len(delta.token_ids) for delta in record.choices)
        advanced = [self._advance(part, delta) for delta in record.choices]
        shown = [choice for choice in advanced if choice is not None]
        if not shown:
            return []
        usage: MaybeUsage = UNSET
        if self._options.continuous_usage:
            usage = usage_of([Usage(self._options.prompt_tokens, self._num_tokens)])
        elif self._options.include_usage:
            usage = None
        return [self.chunk_type(*self._head, shown, usage=usage)]

    def finish(self, part: int, usage: Usage) -> list[Any]:
        self._usages.append(usage)
        wanted = self._options.include_usage or self._options.continuous_usage
        if not wanted or len(self._usages) < self._options.parts:
            return []
        return [self.chunk_type(*self._head, [], usage=usage_of(self._usages))]

    def answer(self) -> Any:
        choices = [self._whole(index, choice) for index, choice in sorted(self._choices.items())]
        return self.answer_type(*self._head, choices, usage=usage_of(self._usages))

    @abstractmethod
    def _advance(self, part: int, delta: ChoiceDelta) -> Any | None:
        """Add to a choice. Return what a chunk shows of it, or None for nothing."""

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> Any:
        """Return a choice of the whole answer."""
