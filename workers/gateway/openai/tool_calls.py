"""Tool calls as OpenAI's clients receive them. Pure."""

import hashlib
from collections.abc import Sequence
from typing import Literal, TypeVar

from msgspec import UNSET, UnsetType

from shared.protocol.requests import FunctionCall, ToolCall
from shared.tool_calls.parser import ToolParser
from shared.tool_calls.scanner import Call, Content
from workers.gateway.schemas.openai_response import CallDelta, FunctionDelta

T = TypeVar("T")


class ChoiceText:
    """The text of a choice, divided into content and tool calls as it arrives."""

    def __init__(
        self, choice: str, form: str | None, names: Sequence[str], *, one_call: bool
    ) -> None:
        """Call ids are derived from `choice`, a unique name. The others are fields of ToolPlan."""
        self._choice = choice
        self._form = form
        self._parser = None if form is None else ToolParser(form, names, one_call=one_call)
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        """The name and the pieces of the arguments of each call."""

    def feed(self, text: str, *, is_last: bool = False) -> tuple[str, list[CallDelta]]:
        """Return the content and the calls that `text` adds."""
        if self._parser is None:
            self._content.append(text)
            return text, []
        pieces = self._parser.feed(text) + (self._parser.end() if is_last else [])
        content = "".join(piece.text for piece in pieces if isinstance(piece, Content))
        self._content.append(content)
        return content, [self._delta(piece) for piece in pieces if isinstance(piece, Call)]

    def _delta(self, call: Call) -> CallDelta:
        if call.name is None:
            self._calls[call.index][1].append(call.arguments)
            return CallDelta(call.index, FunctionDelta(call.arguments))
        self._calls.append((call.name, [call.arguments]))
        function = FunctionDelta(call.arguments, call.name)
        return CallDelta(call.index, function, self._call_id(call.index), "function")

    def whole(self) -> tuple[str | None, list[ToolCall] | UnsetType]:
        """Return the content and the calls of a message."""
        calls = [
            ToolCall(self._call_id(index), FunctionCall(name, "".join(arguments)))
            for index, (name, arguments) in enumerate(self._calls)
        ]
        content = "".join(self._content)
        return None if calls and not content else content, calls or UNSET

    def finish_reason(self, reason: T) -> T | Literal["tool_calls"]:
        """Return `reason`, unless the text ended by itself and has calls."""
        return "tool_calls" if self._calls and reason == "stop" else reason

    def _call_id(self, index: int) -> str:
        """Return the id of a call, derived from the choice: it is the same in all gateways."""
        name = f"{self._choice}:{index}".encode()
        number = int.from_bytes(hashlib.sha256(name).digest(), "big")
        if self._form == "mistral":
            return f"{number % 10**9:09d}"  # Mistral's chat templates accept no other ids.
        return f"call_{number % 16**24:024x}"
