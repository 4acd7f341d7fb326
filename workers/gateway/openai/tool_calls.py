"""Tool calls as OpenAI's clients receive them. Pure."""

import hashlib

from workers.gateway.openai.tool_scanner import Call
from workers.gateway.schemas.openai_response import CallDelta, FunctionDelta


def call_delta(call: Call, choice: str, form: str | None) -> CallDelta:
    """Return what a stream shows of a call. `choice` names the choice, and so its calls."""
    if call.name is None:
        return CallDelta(call.index, FunctionDelta(call.arguments))
    function = FunctionDelta(call.arguments, call.name)
    return CallDelta(call.index, function, call_id(choice, call.index, form), "function")


def call_id(choice: str, index: int, form: str | None) -> str:
    """Return the id of a call. It follows from the choice, so every gateway makes the same."""
    name = f"{choice}:{index}".encode()
    number = int.from_bytes(hashlib.sha256(name).digest(), "big")
    if form == "mistral":
        return f"{number % 10**9:09d}"  # Mistral's chat templates accept no other ids.
    return f"call_{number % 16**24:024x}"
