"""Base class of the assemblers of completions and chat completions. Pure."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, TypeVar

from msgspec import UNSET

from shared.protocol.records import AnyRecord, ChoiceDelta, Finish, TokenChunk, Usage
from workers.gateway.core.assembler import Answering, Assembler
from workers.gateway.core.plan import UsageOptions
from workers.gateway.schemas.openai_response import FinishReason, MaybeUsage, usage_of


@dataclass(slots=True, kw_only=True)
class ChoiceState:
    """State of one choice."""

    has_begun: bool = False
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


Options = TypeVar("Options", bound=UsageOptions)
Choice = TypeVar("Choice", bound=ChoiceState)


class OpenAIAssembler(Assembler[Options], Generic[Options, Choice]):
    """Base class of assemblers that return lists of choices, in chunks and in whole answers."""

    chunk_type: ClassVar[type[Any]]
    answer_type: ClassVar[type[Any]]

    def __init__(self, request: Answering[Options]) -> None:
        super().__init__(request)
        self.choices: dict[int, Choice] = {}
        self.usages: list[Usage] = []
        self.num_tokens = 0
        self.audio_tokens: int | None = None
        """Tokens of the speech; None for an answer that is not spoken."""

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        match record:
            case TokenChunk():
                return self._add_tokens(part, record)
            case Finish():
                return self._finish(record)
            case _:
                return []

    def _add_tokens(self, part: int, record: TokenChunk) -> list[Any]:
        self.num_tokens += sum(len(delta.token_ids) for delta in record.choices)
        choices = [
            choice for delta in record.choices if (choice := self._advance(part, delta)) is not None
        ]
        return [self._chunk(choices)] if choices else []

    def _chunk(self, choices: list[Any]) -> Any:
        usage: MaybeUsage = UNSET
        if self.options.continuous_usage:
            usage = usage_of([Usage(self.options.prompt_tokens or 0, self.num_tokens)])
        elif self.options.include_usage:
            usage = None
        return self._message(self.chunk_type, choices, usage)

    def _finish(self, record: Finish) -> list[Any]:
        self.usages.append(record.usage)
        has_usage = self.options.include_usage or self.options.continuous_usage
        if not has_usage or len(self.usages) < self.options.parts:
            return []
        return [self._message(self.chunk_type, [], usage_of(self.usages, self.audio_tokens))]

    def answer(self) -> Any:
        choices = [self._whole(index, choice) for index, choice in sorted(self.choices.items())]
        return self._message(self.answer_type, choices, usage_of(self.usages, self.audio_tokens))

    def _message(self, message_type: type[Any], choices: list[Any], usage: MaybeUsage) -> Any:
        request = self.request
        return message_type(
            request.request_id, request.created_s, request.model, choices, usage=usage
        )

    @abstractmethod
    def _advance(self, part: int, delta: ChoiceDelta) -> Any | None:
        """Add a delta to its choice. Return the choice of a chunk, or None if it would be empty."""

    @abstractmethod
    def _whole(self, index: int, choice: Choice) -> Any:
        """Return a choice of the whole answer."""
