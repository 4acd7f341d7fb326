"""State of a response, computed from the steps of its log alone. Pure."""

from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from shared.protocol.items import (
    ApprovalRequestItem,
    CallItem,
    FunctionCallItem,
    ImageCallItem,
    Item,
    ItemStatus,
    ListToolsItem,
    McpCallItem,
    MessageItem,
    OutputItem,
    OutputTextPart,
    item_id,
    new_call_id,
)
from shared.protocol.records import Usage
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import (
    GIVEN_TURN,
    Answered,
    Asked,
    Begun,
    Decided,
    Ended,
    Listed,
    PaintTool,
    Result,
    Sending,
    Step,
    painting_id,
    turn_id,
)
from shared.responses.calls import ServerCall
from shared.responses.tools import (
    PAINT,
    PromptTool,
    ToolTable,
    paint_arguments,
    prompt_of,
    schema_digest,
)

UNKNOWN_OUTCOME = (
    "the outcome is unknown: the call was sent, and no answer came; it may have been carried out"
)
_IMAGE_STATUS = {"calling": "generating", "incomplete": "failed"}
"""Status of a call → status of an image, where the two differ."""
OVER_LIMIT = "not called: the response has reached its limit on tool calls (max_tool_calls)"


@dataclass(slots=True)
class PendingApproval:
    """A call that waits for a person's approval."""

    item: ApprovalRequestItem
    schema_digest: str


class ResponseState:
    """The state of one response after the steps that were applied to it."""

    def __init__(self, response_id: str) -> None:
        self.response_id = response_id
        self.num_steps = 0
        self.begun: Begun | None = None
        self.ended: Ended | None = None
        self.output: list[OutputItem] = []
        self.output_turns: list[int | None] = []
        """Number of the turn of each output item; None for a listing of tools."""
        self.listings: dict[str, Listed] = {}
        self.turns: list[Asked] = []
        self.answers: list[Answered] = []
        self.calls: dict[tuple[int, int], ServerCall] = {}
        self.num_function_calls = 0
        self.approvals: dict[str, PendingApproval] = {}
        self.decisions: dict[str, Decided] = {}

    def apply(self, step: Step) -> None:
        """Apply the next step. The caller passes steps in the order of the log."""
        self.num_steps = step.index + 1
        match step:
            case Begun():
                self._begin(step)
            case Listed():
                self._add_listing(step)
            case Asked():
                self.turns.append(step)
            case Answered():
                self._add_answer(step)
            case Sending():
                call = self.calls[step.turn, step.call]
                call.sendings.append(step)
                self._change(call, status="calling")
            case Result():
                self._add_result(step)
            case Ended():
                self._end(step)
            case Decided():
                self.decisions[step.approval_id] = step

    def _begin(self, step: Begun) -> None:
        self.begun = step
        for number, approved in enumerate(step.approved):
            item = McpCallItem(
                self._item_id("mcp_call", GIVEN_TURN, number),
                approved.label,
                approved.name,
                approved.arguments,
                "in_progress",
                approval_request_id=approved.request_id,
            )
            self._add_call(GIVEN_TURN, number, item, approved.arguments, None)
        if step.painter is not None and step.painter.prompt is not None:
            self._add_painting(GIVEN_TURN, 0, paint_arguments(step.painter.prompt), None)
        if step.asks:
            self.turns.append(Asked(step.index, 0))

    @property
    def usage(self) -> Usage:
        """Token usage of all turns together."""
        used = [answer.usage for answer in self.answers]
        return Usage(
            sum(usage.prompt_tokens for usage in used),
            sum(usage.completion_tokens for usage in used),
            sum(usage.cached_tokens for usage in used),
        )

    @property
    def pending(self) -> ServerCall | None:
        """The first call that has no result."""
        return next((call for call in self.calls.values() if call.is_pending), None)

    @property
    def open_requests(self) -> list[str]:
        """Ids of the requests for a turn and for images that have no outcome yet."""
        assert self.begun is not None
        tenant, response_id = self.begun.tenant, self.response_id
        turns = [turn.turn for turn in self.turns[len(self.answers) :]]
        images = [call for call in self.calls.values() if call.paints and call.is_pending]
        return [
            *(turn_id(tenant, response_id, turn) for turn in turns),
            *(painting_id(tenant, response_id, call.turn, call.number) for call in images),
        ]

    def painted_before(self, turn: int) -> str | None:
        """Return the last image of the turns before this one, in base64."""
        files = [
            call.result.output
            for call in self.calls.values()
            if call.paints and call.turn < turn and call.result is not None
        ]
        return next((file for file in reversed(files) if file is not None), None)

    @property
    def num_server_calls(self) -> int:
        return sum(not call.over_limit for call in self.calls.values())

    @property
    def items(self) -> list[Item]:
        """Input and output items; the conversation of a following response begins with them."""
        assert self.begun is not None
        return [*self.begun.input, *self.output]

    def tools(self) -> ToolTable:
        """Return the tools of the turn without an answer, or else of the next turn."""
        assert self.begun is not None
        has_called = bool(self.num_function_calls or self.num_server_calls)
        return ToolTable(self.begun, self.listings, has_called=has_called)

    def _item_id(self, kind: str, turn: int, number: int = 0) -> str:
        return item_id(kind, self.response_id, str(turn), number)

    def _add_listing(self, step: Listed) -> None:
        self.listings[step.label] = step
        if not step.inherited:
            item = ListToolsItem(
                item_id("mcp_list_tools", self.response_id, step.label),
                step.label,
                step.tools,
                step.error,
            )
            self._append(item, None)
        table = self.tools()
        for call in self.calls.values():
            if call.label == step.label:
                call.tool = table.find(call.label, call.name)

    def _add_answer(self, step: Answered) -> None:
        table = self.tools()
        self.answers.append(step)
        for number, call in enumerate(step.calls):
            if number == step.num_before:
                self._add_message(step)
            is_cut = step.finish_reason == "length" and number == len(step.calls) - 1
            self._add_call_of(step.turn, number, call, table, is_cut=is_cut)
        if len(step.calls) <= step.num_before:
            self._add_message(step)

    def _add_message(self, step: Answered) -> None:
        if step.content or not step.calls:
            done = step.finish_reason == "stop"
            message = MessageItem(
                "assistant",
                [OutputTextPart(step.content)],
                self._item_id("message", step.turn),
                "completed" if done else "incomplete",
            )
            self._append(message, step.turn)

    def _add_call_of(
        self, turn: int, number: int, call: FunctionCall, table: ToolTable, *, is_cut: bool
    ) -> None:
        """Add the item of a call. A call that the token limit has cut off is not carried out."""
        assert self.begun is not None
        tool = table.tools[call.name]
        if tool.paints:
            self._add_painting(turn, number, call.arguments, tool, is_cut=is_cut)
        elif tool.label is None or tool.listed is None:
            self.num_function_calls += 1
            call_id = new_call_id(self.begun.parser, self.response_id, turn, number)
            status: ItemStatus = "incomplete" if is_cut else "completed"
            item = FunctionCallItem(
                call_id,
                call.name,
                call.arguments,
                self._item_id("function_call", turn, number),
                status,
            )
            self._append(item, turn)
        elif tool.needs_approval and not is_cut:
            request_id = self._item_id("mcp_approval_request", turn, number)
            request = ApprovalRequestItem(request_id, tool.label, tool.listed.name, call.arguments)
            self._ask(request, schema_digest(tool.listed), turn)
        else:
            item_of_call = McpCallItem(
                self._item_id("mcp_call", turn, number),
                tool.label,
                tool.listed.name,
                call.arguments,
                "incomplete" if is_cut else "in_progress",
            )
            if is_cut:
                self._append(item_of_call, turn)
            else:
                self._add_call(turn, number, item_of_call, call.arguments, tool)

    def _add_painting(
        self,
        turn: int,
        number: int,
        arguments: str,
        tool: PromptTool | None,
        *,
        is_cut: bool = False,
    ) -> None:
        assert self.begun is not None
        assert self.begun.painter is not None
        item = new_image_item(self.response_id, turn, number, self.begun.painter)
        prompt = prompt_of(arguments)
        if is_cut:
            self._append(replace(item, status="failed"), turn)
        else:
            item = replace(item, revised_prompt=prompt)
            self._add_call(turn, number, item, arguments, tool)

    def _ask(self, request: ApprovalRequestItem, digest: str, turn: int) -> None:
        self._append(request, turn)
        self.approvals[request.id] = PendingApproval(request, digest)

    def _append(self, item: OutputItem, turn: int | None) -> None:
        self.output.append(item)
        self.output_turns.append(turn)

    def _add_call(
        self, turn: int, number: int, item: CallItem, arguments: str, tool: PromptTool | None
    ) -> None:
        assert self.begun is not None
        over = self.num_server_calls >= self.begun.max_tool_calls
        self.calls[turn, number] = ServerCall(
            turn,
            number,
            "" if isinstance(item, ImageCallItem) else item.server_label,
            PAINT if isinstance(item, ImageCallItem) else item.name,
            arguments,
            len(self.output),
            tool,
            over_limit=over,
        )
        self._append(item, turn)

    def _add_result(self, step: Result) -> None:
        call = self.calls[step.turn, step.call]
        call.result = step
        status = "completed" if step.outcome == "result" else "failed"
        self._change(call, status=status, output=step.output, error=step.error)
        if step.ask and call.tool is not None and call.tool.listed is not None:
            request_id = self._item_id("mcp_approval_request", step.turn, step.call)
            request = ApprovalRequestItem(request_id, call.label, call.name, call.arguments)
            self._ask(request, schema_digest(call.tool.listed), step.turn)

    def _end(self, step: Ended) -> None:
        self.ended = step
        for call in self.calls.values():
            if call.is_pending and call.sendings and not call.paints:
                self._change(call, status="failed", error=unknown_error())
            elif call.is_pending:
                self._change(call, status="incomplete")

    def _change(self, call: ServerCall, **changes: Any) -> None:
        item = self.output[call.position]
        if isinstance(item, ImageCallItem):
            changes = {
                "status": _IMAGE_STATUS.get(changes["status"], changes["status"]),
                "result": changes.get("output"),
                "error": changes.get("error"),
                "size": (call.result and call.result.size) or item.size,
            }
        self.output[call.position] = replace(item, **changes)


def new_image_item(response_id: str, turn: int, number: int, painter: PaintTool) -> ImageCallItem:
    """Return the item of an image that is not painted yet."""
    return ImageCallItem(
        item_id("image_generation_call", response_id, str(turn), number),
        "in_progress",
        size=painter.size,
        output_format="png",
        action="edit" if painter.input_images else "generate",
        background="opaque",
        quality="auto",
    )


def unknown_error(reason: str = "") -> dict[str, Any]:
    """Return the error of a call with an unknown outcome: it may have been carried out."""
    message = UNKNOWN_OUTCOME if reason in ("", UNKNOWN_OUTCOME) else f"{UNKNOWN_OUTCOME}: {reason}"
    return {"type": "http_error", "code": 0, "message": message}


def state_of(response_id: str, steps: list[Step]) -> ResponseState:
    state = ResponseState(response_id)
    for step in steps:
        state.apply(step)
    return state
