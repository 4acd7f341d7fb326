"""Derendered text → choices of a chat completion, with the tool calls in it. Pure.

A client cannot carry a parser from one event to the next, but it can carry the text that was
parsed. Each event parses that text again, and returns only the new pieces.
"""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from shared.protocol.renderer_rpc import ModelCard
from shared.validation import split_validation_error
from workers.gateway.openai.chat import ToolPlan, tool_plan
from workers.gateway.openai.tool_calls import call_delta
from workers.gateway.openai.tool_parser import ToolParser
from workers.gateway.openai.tool_scanner import Call
from workers.gateway.schemas.generate import TextContent
from workers.gateway.schemas.openai_request import ChatRequest
from workers.gateway.schemas.openai_response import CallBody, CallDelta, CalledFunction
from workers.gateway.vllm.derender_schema import (
    DerenderChatChoice,
    DerenderChatDelta,
    DerenderChatMessage,
    DerenderChatStreamChoice,
    GeneratedChoice,
    StreamState,
)
from workers.gateway.vllm.errors import body_error

# Fields of the rendered request that decide how its answer is read. Its other fields have had their
# effect, and may be as any server writes them.
_FORMAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls", "response_format")


@dataclass(frozen=True, slots=True)
class ChoiceText:
    """The decoded tokens of a choice, or those that an event adds to it."""

    text: str
    logprobs: TextContent | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class ChatFormat:
    """The format of an answer, as the request that was rendered asks for it."""

    plan: ToolPlan = field(default_factory=ToolPlan)
    skips_special: bool = True
    shows_ids: bool = False

    def answer(
        self, request_id: str, choice: GeneratedChoice, text: ChoiceText
    ) -> DerenderChatChoice:
        divided = divide(self.plan, f"{request_id}:{choice.index}", "", text.text, is_last=True)
        calls = join_calls(divided.calls)
        content = None if calls and not divided.content else divided.content
        return DerenderChatChoice(
            index=choice.index,
            message=DerenderChatMessage(content=content, tool_calls=calls or UNSET),
            logprobs=text.logprobs,
            finish_reason=_finish_reason(choice, divided),
            stop_reason=choice.stop_reason,
            token_ids=text.token_ids if self.shows_ids else None,
        )

    def event(
        self, request_id: str, choice: GeneratedChoice, text: ChoiceText, before: StreamState
    ) -> DerenderChatStreamChoice:
        name, is_last = f"{request_id}:{choice.index}", choice.finish_reason is not None
        divided = divide(self.plan, name, before.text, text.text, is_last=is_last)
        return DerenderChatStreamChoice(
            index=choice.index,
            delta=DerenderChatDelta(
                role=None if before.role_sent else "assistant",
                content=divided.content or None,
                tool_calls=divided.calls or UNSET,
            ),
            logprobs=text.logprobs,
            finish_reason=_finish_reason(choice, divided),
            stop_reason=choice.stop_reason,
            token_ids=text.token_ids if self.shows_ids else None,
        )

    def with_text(self, before: StreamState, after: StreamState, text: ChoiceText) -> StreamState:
        """Return the state `after` an event with all the text, where it is needed again."""
        if self.plan.form is None:
            return after
        return msgspec.structs.replace(after, text=before.text + text.text)


def chat_format_of(model: str, request: dict[str, Any], card: ModelCard | None) -> ChatFormat:
    """`card` is needed where there are tools. Raises a RequestError with the field."""
    given = {name: request[name] for name in _FORMAT_FIELDS if request.get(name) is not None}
    try:
        asked = msgspec.convert(
            {"model": model, "messages": [{"role": "user", "content": ""}]} | given, ChatRequest
        )
    except msgspec.ValidationError as error:
        complaint, path = split_validation_error(error)
        raise body_error(f"chat_request.{path}", complaint) from error
    plan = tool_plan(asked, card)
    skips = request.get("skip_special_tokens")
    # The marks by which calls are found may be special tokens.
    needs_marks = plan.form is not None and plan.structure is None
    return ChatFormat(
        plan,
        skips_special=not needs_marks and (skips is None or bool(skips)),
        shows_ids=bool(request.get("return_token_ids")),
    )


def _finish_reason(choice: GeneratedChoice, divided: "Divided") -> str | None:
    has_called = divided.has_calls and choice.finish_reason == "stop"
    return "tool_calls" if has_called else choice.finish_reason


class Divided(NamedTuple):
    content: str
    calls: list[CallDelta]
    has_calls: bool
    """Whether there is a call in all the text so far."""


def divide(plan: ToolPlan, choice: str, before: str, text: str, *, is_last: bool) -> Divided:
    """Divide `text`, which follows `before`, into content and calls. `choice` names the choice."""
    if plan.form is None:
        return Divided(text, [], False)
    parser = ToolParser(plan.form, plan.names, one_call=plan.one_call)
    parser.feed(before)
    pieces = parser.feed(text) + (parser.end() if is_last else [])
    content = "".join(piece.text for piece in pieces if not isinstance(piece, Call))
    calls = [call_delta(piece, choice, plan.form) for piece in pieces if isinstance(piece, Call)]
    return Divided(content, calls, parser.has_calls)


def join_calls(deltas: list[CallDelta]) -> list[CallBody]:
    """Join all the deltas of a choice. A call has one or more, the first of them with its name."""
    names: dict[int, tuple[str, str]] = {}
    arguments: dict[int, str] = {}
    for delta in deltas:
        if isinstance(delta.id, str) and isinstance(delta.function.name, str):
            names[delta.index] = delta.id, delta.function.name
        arguments[delta.index] = arguments.get(delta.index, "") + delta.function.arguments
    return [
        CallBody(call_id, CalledFunction(name, arguments[index]))
        for index, (call_id, name) in sorted(names.items())
    ]
