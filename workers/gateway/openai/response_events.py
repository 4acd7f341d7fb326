"""Events of a response, from its steps and the token logs of its turns. Pure.

The steps have one order, and the records of a turn belong between its steps Asked and Answered. The
events depend on this order alone, so their sequence numbers are the same in every gateway, at every
time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from shared.protocol.items import (
    FunctionCallItem,
    ImageCallItem,
    ListToolsItem,
    McpCallItem,
    MessageItem,
    OutputItem,
    OutputTextPart,
    item_id,
    new_call_id,
)
from shared.protocol.records import TokenChunk
from shared.protocol.steps import Answered, Asked, Begun, Ended, Listed, Result, Sending, Step
from shared.responses.calls import ServerCall
from shared.responses.state import ResponseState, new_image_item
from shared.responses.tools import ToolTable
from shared.responses.turns import turn_format
from shared.tool_calls.scanner import Call
from shared.tool_calls.turn_text import TurnText
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.openai.response_object import message_logprobs, response_of
from workers.gateway.schemas.openai_response import TokenLogprob
from workers.gateway.schemas.responses import ResponseEvent

_ENDINGS = {
    "completed": "response.completed",
    "incomplete": "response.incomplete",
    "failed": "response.failed",
    # OpenAI has no event for a cancellation.
    "cancelled": "response.incomplete",
}


@dataclass
class _OpenTurn:
    """A turn whose answer the model is writing."""

    turn: int
    text: TurnText
    table: ToolTable
    first_index: int
    """Output index of its first item."""
    message_index: int | None = None
    call_indexes: dict[int, int | None] = field(default_factory=dict)
    """Output index by the number of a call; None for a call that needs approval."""
    num_items: int = 0
    logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log probabilities of text that is not in an event yet."""

    def next_index(self) -> int:
        self.num_items += 1
        return self.first_index + self.num_items - 1


class ResponseEvents:
    """Makes the events of one response."""

    def __init__(self, response_id: str, token_bytes: TokenBytes) -> None:
        self.state = ResponseState(response_id)
        self._token_bytes = token_bytes
        self._next_number = 0
        self._open: _OpenTurn | None = None
        self._num_initial = 0
        """Number of calls with which the response begins."""

    def step(self, step: Step) -> list[ResponseEvent]:
        return list(self._apply(step))

    def token(self, record: TokenChunk) -> list[ResponseEvent]:
        return list(self._add_tokens(record))

    def _event(self, kind: str, **fields: Any) -> ResponseEvent:
        self._next_number += 1
        return ResponseEvent(f"response.{kind}", self._next_number - 1, **fields)

    def _item_event(self, kind: str, index: int, id_: str | None, **fields: Any) -> ResponseEvent:
        """Return an event of the item at an output index."""
        return self._event(kind, output_index=index, item_id=id_, **fields)

    def _response(self, kind: str) -> ResponseEvent:
        return self._event(kind, response=response_of(self.state, self._token_bytes))

    def _without_output(self, kind: str) -> ResponseEvent:
        """Return an event with the response, but not its items: separate events add them."""
        body = replace(response_of(self.state, self._token_bytes), output=[])
        return self._event(kind, response=body)

    # -- steps ------------------------------------------------------------------------------------

    def _apply(self, step: Step) -> Iterator[ResponseEvent]:
        was_queued = self.state.num_steps == 1 and self._is_background
        self.state.apply(step)
        if was_queued and not isinstance(step, Ended):
            yield self._without_output("in_progress")
        if was_queued:
            yield from self._begin_initial_calls()
        match step:
            case Begun():
                yield from self._begun(step)
            case Listed(inherited=False):
                yield from self._listed(len(self.state.output) - 1)
            case Asked():
                self._begin_turn(step)
            case Answered():
                yield from self._answered(step)
            case Sending():
                yield from self._sending(step)
            case Result():
                yield from self._result(step)
            case Ended():
                kind = _ENDINGS[step.status].removeprefix("response.")
                yield self._response(kind)

    def _begun(self, step: Begun) -> Iterator[ResponseEvent]:
        yield self._without_output("created")
        yield self._without_output("queued" if step.background else "in_progress")
        self._num_initial = len(self.state.output)
        if not step.background:
            yield from self._begin_initial_calls()
        if step.asks:
            self._begin_turn(self.state.turns[0])

    def _begin_initial_calls(self) -> Iterator[ResponseEvent]:
        """Yield the first events of the calls with which the response begins."""
        for index, item in enumerate(self.state.output[: self._num_initial]):
            if isinstance(item, ImageCallItem):
                yield from self._begin_image(index, item)
            else:
                yield from self._begin_call(index, item)

    @property
    def _is_background(self) -> bool:
        return self.state.begun is not None and self.state.begun.background

    def _added(self, index: int, item: OutputItem) -> ResponseEvent:
        return self._event("output_item.added", output_index=index, item=item)

    def _done(self, index: int, item: OutputItem) -> ResponseEvent:
        return self._event("output_item.done", output_index=index, item=item)

    def _begin_call(self, index: int, item: OutputItem) -> Iterator[ResponseEvent]:
        """Yield the first events of a call that was not streamed."""
        assert isinstance(item, McpCallItem)
        arguments = item.arguments
        yield self._added(index, replace(item, arguments="", status="in_progress"))
        yield self._item_event("mcp_call.in_progress", index, item.id)
        yield self._item_event("mcp_call_arguments.delta", index, item.id, delta=arguments)
        yield self._item_event("mcp_call_arguments.done", index, item.id, arguments=arguments)

    def _begin_image(self, index: int, item: ImageCallItem) -> Iterator[ResponseEvent]:
        new = replace(item, status="in_progress", revised_prompt=None)
        yield self._added(index, new)
        yield self._item_event("image_generation_call.in_progress", index, item.id)

    def preview(self, call: ServerCall, number: int, file: str) -> ResponseEvent:
        """Return the event of a preview, in base64, of an image that is being painted."""
        item = self.state.output[call.position]
        assert isinstance(item, ImageCallItem)
        return self._item_event(
            "image_generation_call.partial_image",
            call.position,
            item.id,
            partial_image_b64=file,
            partial_image_index=number,
        )

    def _listed(self, index: int) -> Iterator[ResponseEvent]:
        item = self.state.output[index]
        assert isinstance(item, ListToolsItem)
        yield self._added(index, replace(item, tools=[], error=None))
        yield self._item_event("mcp_list_tools.in_progress", index, item.id)
        ending = "completed" if item.error is None else "failed"
        yield self._item_event(f"mcp_list_tools.{ending}", index, item.id)
        yield self._done(index, item)

    def _sending(self, step: Sending) -> Iterator[ResponseEvent]:
        call = self.state.calls[step.turn, step.call]
        item = self.state.output[call.position]
        if isinstance(item, ImageCallItem):
            yield self._item_event("image_generation_call.generating", call.position, item.id)

    def _result(self, step: Result) -> Iterator[ResponseEvent]:
        call = self.state.calls[step.turn, step.call]
        item = self.state.output[call.position]
        assert isinstance(item, McpCallItem | ImageCallItem)
        is_done = step.outcome == "result"
        if isinstance(item, McpCallItem):
            ending = "completed" if is_done else "failed"
            yield self._item_event(f"mcp_call.{ending}", call.position, item.id)
        elif is_done:  # OpenAI has no event for an image that was not painted.
            yield self._item_event("image_generation_call.completed", call.position, item.id)
        yield self._done(call.position, item)
        if step.ask:
            index = len(self.state.output) - 1
            yield self._added(index, self.state.output[index])
            yield self._done(index, self.state.output[index])

    # -- turns ------------------------------------------------------------------------------------

    def _begin_turn(self, step: Asked) -> None:
        table = self.state.tools()
        text = turn_format(self.state, step, table).new_text()
        self._open = _OpenTurn(step.turn, text, table, len(self.state.output))

    def _add_tokens(self, record: TokenChunk) -> Iterator[ResponseEvent]:
        turn = self._open
        assert turn is not None
        for delta in record.choices:
            turn.logprobs += message_logprobs(delta.token_ids, delta.logprobs, self._token_bytes)
            for piece in turn.text.feed(delta.text, is_last=delta.finish_reason is not None):
                if isinstance(piece, Call):
                    yield from self._call_piece(turn, piece)
                else:
                    yield from self._text_piece(turn, piece.text)

    def _text_piece(self, turn: _OpenTurn, text: str) -> Iterator[ResponseEvent]:
        message_id = item_id("message", self.state.response_id, str(turn.turn))
        if turn.message_index is None:
            turn.message_index = turn.next_index()
            yield from self._begin_message(turn.message_index, message_id)
        if text:
            yield self._item_event(
                "output_text.delta",
                turn.message_index,
                message_id,
                content_index=0,
                delta=text,
                logprobs=turn.logprobs,
            )
            turn.logprobs = []

    def _begin_message(self, index: int, message_id: str) -> Iterator[ResponseEvent]:
        yield self._added(index, MessageItem("assistant", [], message_id, "in_progress"))
        part = OutputTextPart("")
        yield self._item_event("content_part.added", index, message_id, content_index=0, part=part)

    def _call_piece(self, turn: _OpenTurn, piece: Call) -> Iterator[ResponseEvent]:
        if piece.name is not None:
            yield from self._start_call(turn, piece.index, piece.name)
        index = turn.call_indexes[piece.index]
        tool = turn.table.tools[turn.text.calls[piece.index].name]
        if index is not None and piece.arguments and not tool.paints:
            kind, call_item_id = self._kind_and_id(turn, piece.index)
            yield self._item_event(
                f"{kind}_arguments.delta", index, call_item_id, delta=piece.arguments
            )

    def _kind_and_id(self, turn: _OpenTurn, number: int) -> tuple[str, str]:
        name = turn.text.calls[number].name
        kind = "function_call" if turn.table.tools[name].label is None else "mcp_call"
        return kind, item_id(kind, self.state.response_id, str(turn.turn), number)

    def _start_call(self, turn: _OpenTurn, number: int, name: str) -> Iterator[ResponseEvent]:
        tool, begun = turn.table.tools[name], self.state.begun
        assert begun is not None
        index = turn.next_index()
        if tool.needs_approval:
            turn.call_indexes[number] = None
            return
        turn.call_indexes[number] = index
        _, call_item_id = self._kind_and_id(turn, number)
        if tool.paints:
            assert begun.painter is not None
            image = new_image_item(self.state.response_id, turn.turn, number, begun.painter)
            yield from self._begin_image(index, image)
        elif tool.label is None or tool.listed is None:
            call_id = new_call_id(begun.parser, self.state.response_id, turn.turn, number)
            yield self._added(
                index, FunctionCallItem(call_id, name, "", call_item_id, "in_progress")
            )
        else:
            item = McpCallItem(call_item_id, tool.label, tool.listed.name, "", "in_progress")
            yield self._added(index, item)
            yield self._item_event("mcp_call.in_progress", index, call_item_id)

    def _answered(self, step: Answered) -> Iterator[ResponseEvent]:
        turn = self._open
        assert turn is not None
        output = self.state.output[turn.first_index :]
        for index, item in enumerate(output, turn.first_index):
            match item:
                case MessageItem():
                    if turn.message_index is None:  # An answer without any text.
                        yield from self._begin_message(index, item.id or "")
                    yield from self._end_message(index, step)
                case FunctionCallItem(name=name, arguments=arguments):
                    kind = "function_call_arguments.done"
                    yield self._item_event(kind, index, item.id, name=name, arguments=arguments)
                    yield self._done(index, item)
                case McpCallItem(arguments=arguments):
                    if index in turn.call_indexes.values():
                        kind = "mcp_call_arguments.done"
                        yield self._item_event(kind, index, item.id, arguments=arguments)
                    else:  # The call needs approval, and its arguments were cut.
                        yield from self._begin_call(index, item)
                    if item.status == "incomplete":
                        yield self._done(index, item)
                case ImageCallItem(status=status):
                    if status == "failed":  # The arguments were cut.
                        yield self._done(index, item)
                case _:
                    yield self._added(index, item)
                    yield self._done(index, item)
        self._open = None

    def _end_message(self, index: int, step: Answered) -> Iterator[ResponseEvent]:
        item = response_of(self.state, self._token_bytes).output[index]
        assert isinstance(item, MessageItem)
        part = item.content[0]
        assert isinstance(part, OutputTextPart)
        yield self._item_event(
            "output_text.done",
            index,
            item.id,
            content_index=0,
            text=step.content,
            logprobs=part.logprobs or [],
        )
        yield self._item_event("content_part.done", index, item.id, content_index=0, part=part)
        yield self._done(index, item)
