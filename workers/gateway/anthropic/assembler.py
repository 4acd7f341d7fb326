"""Assembler of messages, as blocks of text and calls of tools. Pure."""

from typing import Any

import msgspec
from msgspec import Raw

from shared.protocol.items import new_call_id
from shared.protocol.records import AnyRecord, ChoiceDelta, Finish, TokenChunk, Usage
from shared.tool_calls.scanner import Call, Piece
from shared.tool_calls.turn_text import TurnText
from workers.gateway.anthropic.messages import FIELDS
from workers.gateway.core.assembler import Answering, Assembler
from workers.gateway.core.kinds import AnswerKind
from workers.gateway.openai.chat import ChatOptions
from workers.gateway.schemas.messages import (
    AnswerBlock,
    AnswerText,
    AnswerToolUse,
    BlockDelta,
    BlockStart,
    BlockStop,
    InputDelta,
    MessageAnswer,
    MessageDelta,
    MessageEvent,
    MessageStart,
    MessageStop,
    MessageUsage,
    StopDelta,
    StopReason,
    TextDelta,
)

EMPTY = Raw(b"{}")


class MessageAssembler(Assembler[ChatOptions]):
    # A record may have all tokens of an answer, and each call begins and ends a block.
    max_events = 2**16

    def __init__(self, request: Answering[ChatOptions]) -> None:
        super().__init__(request)
        options = self.options
        one_call = bool(options.one_call)
        self._text = TurnText(options.form or None, options.names or [], one_call=one_call)
        self._blocks: list[Call | None] = []
        """The call of each block, or None for text."""
        self._texts: list[list[str]] = []
        """The pieces of each block's text, or of its call's arguments."""
        self._has_begun = False
        self._end: ChoiceDelta | None = None
        self._usage = Usage(options.prompt_tokens or 0, 0)

    def add(self, part: int, record: AnyRecord, file: str = "") -> list[Any]:
        events: list[MessageEvent] = []
        if not self._has_begun:
            self._has_begun = True
            events.append(MessageStart(self._message([])))
        match record:
            case TokenChunk(choices=choices):
                for delta in choices:
                    events += self._add_text(delta)
            case Finish(usage=usage):
                self._usage = usage
                events += [*self._end_block(), *self._stop()]
            case _:
                pass
        return events

    def _add_text(self, delta: ChoiceDelta) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        if delta.finish_reason is not None:
            self._end = delta
        for piece in self._text.feed(delta.text, is_last=delta.finish_reason is not None):
            events += self._add_piece(piece)
        return events

    def _add_piece(self, piece: Piece) -> list[MessageEvent]:
        events: list[MessageEvent] = []
        delta: TextDelta | InputDelta
        if isinstance(piece, Call):
            call, is_new = piece, piece.name is not None
            text, delta = piece.arguments, InputDelta(piece.arguments)
        else:
            call, is_new = None, not self._blocks or self._blocks[-1] is not None
            text, delta = piece.text, TextDelta(piece.text)
        if is_new:
            events += self._end_block()
            self._blocks.append(call)
            self._texts.append([])
            number = len(self._blocks) - 1
            events.append(BlockStart(number, self._block(number)))
        if text:
            if self.collects_answer:
                self._texts[-1].append(text)
            events.append(BlockDelta(len(self._blocks) - 1, delta))
        return events

    def _end_block(self) -> list[MessageEvent]:
        return [BlockStop(len(self._blocks) - 1)] if self._blocks else []

    def _stop(self) -> list[MessageEvent]:
        delta = StopDelta(self._stop_reason, self._stop_sequence)
        return [MessageDelta(delta, _usage_of(self._usage)), MessageStop()]

    @property
    def _stop_sequence(self) -> str | None:
        reason = None if self._end is None else self._end.stop_reason
        return reason if isinstance(reason, str) else None

    @property
    def _stop_reason(self) -> StopReason | None:
        if self._end is None:
            return None
        if self._end.finish_reason == "length":
            return "max_tokens"
        if any(self._blocks):
            return "tool_use"
        return "end_turn" if self._stop_sequence is None else "stop_sequence"

    def _block(self, number: int) -> AnswerBlock:
        call, text = self._blocks[number], "".join(self._texts[number])
        if call is None:
            return AnswerText(text)
        call_id = new_call_id(self.options.form or None, self.request.request_id, 0, call.index)
        return AnswerToolUse(call_id, call.name or "", _input_of(text))

    def answer(self) -> MessageAnswer:
        return self._message([self._block(number) for number in range(len(self._blocks))])

    def _message(self, content: list[AnswerBlock]) -> MessageAnswer:
        return MessageAnswer(
            id=self.request.request_id,
            model=self.request.model,
            content=content,
            stop_reason=self._stop_reason,
            stop_sequence=self._stop_sequence,
            usage=_usage_of(self._usage),
        )


def _usage_of(usage: Usage) -> MessageUsage:
    cached = usage.cached_tokens
    return MessageUsage(usage.prompt_tokens - cached, usage.completion_tokens, cached)


def _input_of(arguments: str) -> Raw:
    """Return the arguments of a call, or an empty object if they are not a JSON object."""
    try:
        msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.MsgspecError, RecursionError):
        return EMPTY
    return Raw(arguments.encode())


def _name_of(event: MessageEvent) -> str:
    return str(type(event).__struct_config__.tag)


MESSAGE = AnswerKind(
    name="message",
    id_prefix="msg",
    options=ChatOptions,
    assembler=MessageAssembler,
    client_fields=FIELDS,
    event_name=_name_of,
)
