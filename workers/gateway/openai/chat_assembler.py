"""Assembler of chat completions. Pure."""

from dataclasses import dataclass, field

from msgspec import UNSET, Struct, UnsetType

from shared.protocol.records import ChoiceDelta, TokenChunk, Usage
from workers.gateway.core.assembler import TokenBytes, or_unset
from workers.gateway.core.logprobs import openai_logprobs
from workers.gateway.openai.tool_calls import call_delta, call_id
from workers.gateway.openai.tool_parser import ToolParser
from workers.gateway.openai.tool_scanner import Call, Piece
from workers.gateway.schemas.openai_response import (
    AnswerMessage,
    CallBody,
    CallDelta,
    CalledFunction,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatLogprobs,
    Delta,
    FinishReason,
    MaybeUsage,
    TokenLogprob,
    usage_of,
)


class ChatOptions(Struct, frozen=True):
    """Options of the answer, stored in the RequestRecord."""

    include_usage: bool = False
    continuous_usage: bool = False
    prompt_tokens: int = 0
    """Set for `continuous_usage` only."""
    logprobs: bool = False
    form: str | None = None
    names: list[str] = []
    one_call: bool = False


@dataclass(slots=True)
class _Choice:
    """One choice so far."""

    parser: ToolParser | None
    begun: bool = False
    text: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)
    """The name and the pieces of the arguments of each call."""
    logprobs: list[TokenLogprob] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


class ChatAssembler:
    """Assembler of chat completions, with tool calls."""

    def __init__(
        self,
        request_id: str,
        model: str,
        created_s: int,
        options: ChatOptions,
        token_bytes: TokenBytes,
    ) -> None:
        self.collects_answer = True
        self._id = request_id
        self._model = model
        self._created_s = created_s
        self._options = options
        self._token_bytes = token_bytes
        self._choices: dict[int, _Choice] = {}
        self._num_tokens = 0
        self._usage: Usage | None = None

    def add(self, part: int, record: TokenChunk) -> ChatChunk | None:
        self._num_tokens += sum(len(delta.token_ids) for delta in record.choices)
        shown = [shown for delta in record.choices if (shown := self._advance(delta)) is not None]
        if not shown:
            return None
        usage: MaybeUsage = UNSET
        if self._options.continuous_usage:
            usage = usage_of([Usage(self._options.prompt_tokens, self._num_tokens)])
        elif self._options.include_usage:
            usage = None
        return ChatChunk(self._id, self._created_s, self._model, shown, usage=usage)

    def finish(self, part: int, usage: Usage) -> ChatChunk | None:
        self._usage = usage
        if not (self._options.include_usage or self._options.continuous_usage):
            return None
        return ChatChunk(self._id, self._created_s, self._model, [], usage=usage_of([usage]))

    def answer(self) -> ChatCompletion:
        assert self._usage is not None
        choices = [self._whole(index, choice) for index, choice in sorted(self._choices.items())]
        return ChatCompletion(
            self._id, self._created_s, self._model, choices, usage_of([self._usage])
        )

    def _advance(self, delta: ChoiceDelta) -> ChatChunkChoice | None:
        choice = self._choices.get(delta.index)
        if choice is None:
            form, options = self._options.form, self._options
            parser = form and ToolParser(form, options.names, one_call=options.one_call)
            choice = self._choices[delta.index] = _Choice(parser or None)
        text, calls = self._parse_text(delta, choice)
        logprobs = None
        if self._options.logprobs and delta.logprobs:
            logprobs = list(openai_logprobs(delta.token_ids, delta.logprobs, self._token_bytes))
            if self.collects_answer:
                choice.logprobs += logprobs
        if delta.finish_reason is not None:
            called = choice.calls and delta.finish_reason == "stop"
            choice.finish_reason = "tool_calls" if called else delta.finish_reason
            choice.stop_reason = delta.stop_reason
        if choice.begun and not (text or calls or logprobs or delta.finish_reason):
            return None
        first, choice.begun = not choice.begun, True
        return ChatChunkChoice(
            delta.index,
            Delta(
                role="assistant" if first else UNSET,
                content=text if text or (first and not calls) else UNSET,
                tool_calls=calls or UNSET,
            ),
            None if logprobs is None else ChatLogprobs(logprobs),
            choice.finish_reason if delta.finish_reason is not None else None,
            or_unset(choice.stop_reason),
        )

    def _parse_text(self, delta: ChoiceDelta, choice: _Choice) -> tuple[str, list[CallDelta]]:
        """Split the new text into content and tool calls, and add both to the choice."""
        if choice.parser is None:
            choice.text.append(delta.text)
            return delta.text, []
        pieces = choice.parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += choice.parser.end()
        text = "".join(piece.text for piece in pieces if not isinstance(piece, Call))
        choice.text.append(text)
        return text, [self._call(delta.index, p, choice) for p in pieces if isinstance(p, Call)]

    def _call(self, index: int, piece: Piece, choice: _Choice) -> CallDelta:
        assert isinstance(piece, Call)
        if piece.name is None:
            choice.calls[piece.index][1].append(piece.arguments)
        else:
            choice.calls.append((piece.name, [piece.arguments]))
        return call_delta(piece, f"{self._id}:{index}", self._options.form)

    def _whole(self, index: int, choice: _Choice) -> ChatChoice:
        text = "".join(choice.text)
        calls: list[CallBody] | UnsetType = [
            CallBody(
                call_id(f"{self._id}:{index}", number, self._options.form),
                CalledFunction(name, "".join(arguments)),
            )
            for number, (name, arguments) in enumerate(choice.calls)
        ] or UNSET
        return ChatChoice(
            index,
            AnswerMessage(None if calls and not text else text, tool_calls=calls),
            ChatLogprobs(choice.logprobs) if self._options.logprobs else None,
            choice.finish_reason,
            or_unset(choice.stop_reason),
        )
