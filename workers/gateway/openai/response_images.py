"""Images of responses: the tool `image_generation`, and models that only paint. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.images import AUTO
from shared.protocol.items import InputTextPart, Item, MessageItem
from shared.protocol.pipeline import TEXT, Pipeline
from shared.protocol.steps import PaintTool
from shared.responses.tools import PAINT
from workers.gateway.core.plan import check_choice
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.responses import ImageTool, ResponseFields, ResponseRequest

# Fields that only affect text, with the values that have no effect.
_TEXT_FIELDS: dict[str, tuple[Any, ...]] = {
    "instructions": (None, ""),
    "previous_response_id": (None,),
    "text": (None,),
    "temperature": (None,),
    "top_p": (None,),
    "top_logprobs": (None, 0),
    "include": (None, []),
    "max_output_tokens": (None,),
    "truncation": (None, "disabled"),
}


def writes_text(model: str, pipelines: Mapping[str, Pipeline]) -> bool:
    return TEXT in pipelines[model].outputs


def check_writes_text(model: str, pipelines: Mapping[str, Pipeline]) -> None:
    """Raises InvalidRequest for a model that only paints."""
    if not writes_text(model, pipelines):
        message = f"{model} writes no text, so its responses need the tool {PAINT}"
        raise InvalidRequest(message, field="model")


def painter_of(
    request: ResponseRequest, items: Sequence[Item], pipelines: Mapping[str, Pipeline]
) -> PaintTool | None:
    """Return the tool that paints images, or None. Raises a RequestError if it cannot be used.

    A model that writes no text paints the text of the input.
    """
    has_text = writes_text(request.model, pipelines)
    tools = [(i, tool) for i, tool in enumerate(request.tools or []) if isinstance(tool, ImageTool)]
    if not tools:
        check_writes_text(request.model, pipelines)
        return None
    (i, tool), *more = tools
    if more:
        raise InvalidRequest(f"there are two tools {PAINT!r}", field=f"tools[{more[0][0]}].type")
    paint_tool = _paint_tool(tool, f"tools[{i}]", request, pipelines)
    return paint_tool if has_text else replace(paint_tool, prompt=_prompt_of(request, items))


def _paint_tool(
    tool: ImageTool, field: str, request: ResponseFields, pipelines: Mapping[str, Pipeline]
) -> PaintTool:
    model = tool.model or request.model
    pipeline = pipelines.get(model)
    painter = None if pipeline is None else pipeline.painter
    if painter is None or painter.output is None:
        raise UnsupportedParameter(
            f"{model} paints no images: name a model that does in the tool's field model",
            field=f"{field}.type" if tool.model is None else f"{field}.model",
        )
    if painter.input_images:
        raise UnsupportedParameter(
            f"{model} only edits images, which responses do not support: use /v1/images/edits",
            field="model" if tool.model is None else f"{field}.model",
        )
    size = str(painter.sampling_defaults.get("size", painter.sizes[0]))
    if tool.size not in (None, AUTO):
        size = str(tool.size)
        check_choice(f"{field}.size", size, painter.sizes)
    return PaintTool(model, painter.output.name, size, tool.partial_images or 0)


def _prompt_of(request: ResponseRequest, items: Sequence[Item]) -> str:
    """Return the prompt of a model that paints a text and reads no conversation."""
    for name, unset in _TEXT_FIELDS.items():
        if getattr(request, name) not in unset:
            raise UnsupportedParameter(
                f"{name} has no effect on {request.model}, which writes no text", field=name
            )
    if request.tool_choice == "none" or len(request.tools or []) > 1:
        raise UnsupportedParameter(
            f"{request.model} writes no text: it always paints, and calls no other tools",
            field="tools" if len(request.tools or []) > 1 else "tool_choice",
        )
    match items:
        case [MessageItem(role="user", content=str(text))]:
            prompt = text
        case [MessageItem(role="user", content=list(parts))] if all(
            isinstance(part, InputTextPart) for part in parts
        ):
            prompt = "".join(part.text for part in parts if isinstance(part, InputTextPart))
        case _:
            raise UnsupportedParameter(
                f"{request.model} paints the text of one user message, and reads no conversation",
                field="input",
            )
    if not prompt.strip():
        raise InvalidRequest("the input has no text to paint", field="input")
    return prompt
