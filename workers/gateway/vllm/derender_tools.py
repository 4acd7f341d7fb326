"""Text that derender has made → choices of a chat, with the calls of tools that are in it. Pure.

A parser cannot be carried from one event to the next, but the text that it has read can: it reads
that again, and tells only what is new.
"""

import hashlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgspec
from msgspec import UNSET

from shared.protocol.renderer_rpc import ModelCard
from shared.validation import split_validation_error
from workers.gateway.openai.chat import ToolPlan, tool_plan
from workers.gateway.openai.tool_parser import ToolParser
from workers.gateway.openai.tool_scanner import Call
from workers.gateway.schemas.generate import TextContent
from workers.gateway.schemas.openai_request import ChatRequest
from workers.gateway.schemas.openai_response import (
    CallBody,
    CallDelta,
    CalledFunction,
    FunctionDelta,
)
from workers.gateway.vllm.derender_schema import (
    DerenderChatChoice,
    DerenderChatDelta,
    DerenderChatMessage,
    DerenderChatStreamChoice,
    GeneratedChoice,
    StreamState,
)
from workers.gateway.vllm.errors import wrong

# Of the request that was rendered. The rest of it has done its part, and may be as any server
# writes it.
_LOOKED_AT = ("tools", "tool_choice", "parallel_tool_calls", "response_format")


@dataclass(frozen=True, slots=True)
class Read:
    """What is known of a choice, or is new of it."""

    text: str
    logprobs: TextContent | None
    token_ids: list[int]


@dataclass(frozen=True, slots=True)
class Looks:
    """What the request that was rendered says of its answer."""

    plan: ToolPlan = field(default_factory=ToolPlan)
    skips_special: bool = True
    shows_ids: bool = False

    def whole(self, request_id: str, choice: GeneratedChoice, read: Read) -> DerenderChatChoice:
        divided = divide(self.plan, f"{request_id}:{choice.index}", "", read.text, last=True)
        calls = whole_calls(divided.calls)
        content = None if calls and not divided.content else divided.content
        return DerenderChatChoice(
            index=choice.index,
            message=DerenderChatMessage(content=content, tool_calls=calls or UNSET),
            logprobs=read.logprobs,
            finish_reason=_reason(choice, divided),
            stop_reason=choice.stop_reason,
            token_ids=read.token_ids if self.shows_ids else None,
        )

    def event(
        self, request_id: str, choice: GeneratedChoice, read: Read, before: StreamState
    ) -> DerenderChatStreamChoice:
        of, last = f"{request_id}:{choice.index}", choice.finish_reason is not None
        divided = divide(self.plan, of, before.text, read.text, last)
        return DerenderChatStreamChoice(
            index=choice.index,
            delta=DerenderChatDelta(
                role=None if before.role_sent else "assistant",
                content=divided.content or None,
                tool_calls=divided.calls or UNSET,
            ),
            logprobs=read.logprobs,
            finish_reason=_reason(choice, divided),
            stop_reason=choice.stop_reason,
            token_ids=read.token_ids if self.shows_ids else None,
        )

    def carried(self, before: StreamState, after: StreamState, read: Read) -> StreamState:
        if self.plan.form is None:
            return after
        return msgspec.structs.replace(after, text=before.text + read.text)


def looks_of(model: str, request: dict[str, Any], card: ModelCard | None) -> Looks:
    """`card` is needed where there are tools. Raises a RequestError with the field."""
    given = {name: request[name] for name in _LOOKED_AT if request.get(name) is not None}
    try:
        asked = msgspec.convert(
            {"model": model, "messages": [{"role": "user", "content": ""}]} | given, ChatRequest
        )
    except msgspec.ValidationError as error:
        what, path = split_validation_error(error)
        raise wrong(f"chat_request.{path}", what) from error
    plan = tool_plan(asked, card)
    skips = request.get("skip_special_tokens")
    # The signs by which calls are found may be special tokens.
    signs = plan.form is not None and plan.structure is None
    return Looks(
        plan,
        skips_special=not signs and (skips is None or bool(skips)),
        shows_ids=bool(request.get("return_token_ids")),
    )


def _reason(choice: GeneratedChoice, divided: "Divided") -> str | None:
    called = divided.has_calls and choice.finish_reason == "stop"
    return "tool_calls" if called else choice.finish_reason


class Divided(NamedTuple):
    content: str
    calls: list[CallDelta]
    has_calls: bool
    """Among all the text so far."""


def divide(plan: ToolPlan, of: str, before: str, text: str, last: bool) -> Divided:
    """`text`, which follows `before`; `of` names the choice, and its calls after it."""
    if plan.form is None:
        return Divided(text, [], False)
    parser = ToolParser(plan.form, plan.names, one_call=plan.one_call)
    parser.feed(before)
    pieces = parser.feed(text) + (parser.end() if last else [])
    content = "".join(piece.text for piece in pieces if not isinstance(piece, Call))
    calls = [_delta(piece, of, plan.form) for piece in pieces if isinstance(piece, Call)]
    return Divided(content, calls, parser.has_calls)


def whole_calls(deltas: list[CallDelta]) -> list[CallBody]:
    """Of all the deltas of a choice; each call comes in one or more, the first with its name."""
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


def _delta(call: Call, of: str, form: str) -> CallDelta:
    if call.name is None:
        return CallDelta(call.index, FunctionDelta(call.arguments))
    function = FunctionDelta(call.arguments, call.name)
    return CallDelta(call.index, function, _call_id(f"{of}:{call.index}", form), "function")


def _call_id(call: str, form: str) -> str:
    """The same whoever makes it, so that nothing of it need be carried."""
    number = int.from_bytes(hashlib.sha256(call.encode()).digest(), "big")
    if form == "mistral":
        return f"{number % 10**9:09d}"  # Its templates take no others.
    return f"call_{number % 16**24:024x}"
