"""Constraint of `strict` functions that a model may choose not to call. Pure."""

from typing import Any

from shared.errors import InvalidRequest
from shared.protocol.renderer_rpc import ModelCard
from shared.tool_calls.grammars import strict_grammar
from workers.gateway.core.plan import structure_of
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.openai_request import ChatRequest


def strict_structure(request: ChatRequest, card: ModelCard) -> dict[str, Any] | None:
    """Return the constraint on an answer if one of the functions is strict, else None.

    Raises a RequestError if the calls cannot be constrained.
    """
    tools = request.tools or []
    strict = next((i for i, tool in enumerate(tools) if tool.function.strict), None)
    if strict is None:
        return None
    if card.call_signs is None:
        raise UnsupportedParameter(
            f"{request.model} writes calls in a format that cannot be constrained while calls are"
            " optional: leave strict out, or set tool_choice to 'required' or to a function",
            field=f"tools[{strict}].function.strict",
        )
    if (other := structure_of(request)) is not None:
        raise InvalidRequest(f"{other[0]} cannot be combined with strict functions", field=other[0])
    return {"grammar": strict_grammar(tools, card.call_signs)}
