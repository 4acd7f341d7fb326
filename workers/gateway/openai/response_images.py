"""Images of responses: the tool `image_generation`, and models that only paint. Pure."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from shared.errors import InvalidRequest
from shared.protocol.images import AUTO, check_input_images, check_size
from shared.protocol.items import ImageCallItem, InputTextPart, Item, MessageItem
from shared.protocol.pipeline import TEXT, Pipeline, StageSpec
from shared.protocol.requests import Tool
from shared.protocol.steps import PaintTool
from shared.responses.conversation import images_of
from shared.responses.tools import EDIT_TOOL, PAINT, PAINT_TOOL
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

_CONVERSATION = "previous_response_id"


class NamedImage(NamedTuple):
    """An image of the conversation."""

    field: str
    """Field of the request with the image, or with the conversation."""
    url: str
    """`data:` or `media:` URL, if a model may edit the image."""


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
    stage = _stage_of(tool, f"tools[{i}]", request, pipelines)
    paint_tool = _paint_tool(tool, f"tools[{i}]", request, stage)
    if has_text:
        return paint_tool
    return replace(paint_tool, prompt=_prompt_of(request, items, edits=stage.input_images > 0))


def paint_tools_of(request: ResponseFields, pipelines: Mapping[str, Pipeline]) -> list[Tool]:
    """Return the tools that paint images, as the prompt shows them.

    Raises UnsupportedParameter for a model that paints no images.
    """
    tools = [(i, tool) for i, tool in enumerate(request.tools or []) if isinstance(tool, ImageTool)]
    stages = [_stage_of(tool, f"tools[{i}]", request, pipelines) for i, tool in tools]
    return [EDIT_TOOL if stage.input_images else PAINT_TOOL for stage in stages]


def images_to_edit(
    request: ResponseFields,
    before: Sequence[Item],
    items: Sequence[Item],
    pipelines: Mapping[str, Pipeline],
) -> list[NamedImage]:
    """Return the images that a response edits: all images of the last item that has any.

    The list is empty for a model that paints without images. `before` are the items of earlier
    responses. Raises InvalidRequest if the model edits another number of images, or if an image
    was not sent.
    """
    tools = [(i, tool) for i, tool in enumerate(request.tools or []) if isinstance(tool, ImageTool)]
    for i, tool in tools:
        limit = _stage_of(tool, f"tools[{i}]", request, pipelines).input_images
        if limit:
            images = _last_images(before, items)
            check_input_images(len(images), limit, images[0].field if images else "input")
            return images
    return []


def _last_images(before: Sequence[Item], items: Sequence[Item]) -> list[NamedImage]:
    painted = {item.id: item.result for item in before if isinstance(item, ImageCallItem)}
    fields = [_CONVERSATION] * len(before) + [f"input[{i}]" for i in range(len(items))]
    for field, item in reversed(list(zip(fields, [*before, *items], strict=True))):
        if isinstance(item, ImageCallItem) and item.status != "failed":
            file = item.result or painted.get(item.id)
            if file is None:
                raise InvalidRequest(
                    f"the image {item.id} is not in the conversation: send its result in the item,"
                    " or the response that has painted it as previous_response_id",
                    field=field,
                )
            return [NamedImage(field, f"data:;base64,{file}")]
        images = [
            NamedImage(field if field == _CONVERSATION else f"{field}.{name}", url)
            for name, url in images_of(item)
        ]
        if images:
            return images
    return []


def _stage_of(
    tool: ImageTool, field: str, request: ResponseFields, pipelines: Mapping[str, Pipeline]
) -> StageSpec:
    """Return the stage that paints. Raises UnsupportedParameter for a model without one."""
    model = tool.model or request.model
    pipeline = pipelines.get(model)
    painter = None if pipeline is None else pipeline.painter
    if painter is None or painter.output is None:
        raise UnsupportedParameter(
            f"{model} paints no images: name a model that does in the tool's field model",
            field=f"{field}.type" if tool.model is None else f"{field}.model",
        )
    return painter


def _paint_tool(
    tool: ImageTool, field: str, request: ResponseFields, painter: StageSpec
) -> PaintTool:
    model = tool.model or request.model
    if tool.action == ("generate" if painter.input_images else "edit"):
        does = "only edits images" if painter.input_images else "edits no images"
        raise UnsupportedParameter(f"{field}.action: {model} {does}", field=f"{field}.action")
    first = AUTO if painter.input_images else painter.sizes[0]
    size = str(painter.sampling_defaults.get("size", first))
    if tool.size not in (None, AUTO):
        size = str(tool.size)
        check_size(size, painter.sizes, painter.size_rule, f"{field}.size")
    assert painter.output is not None
    return PaintTool(model, painter.output.name, size, tool.partial_images or 0)


def _prompt_of(request: ResponseRequest, items: Sequence[Item], *, edits: bool) -> str:
    """Return the prompt of a model that reads one text, and no conversation but images to edit."""
    for name, unset in _TEXT_FIELDS.items():
        if getattr(request, name) not in unset and not (edits and name == _CONVERSATION):
            raise UnsupportedParameter(
                f"{name} has no effect on {request.model}, which writes no text", field=name
            )
    if request.tool_choice == "none" or len(request.tools or []) > 1:
        raise UnsupportedParameter(
            f"{request.model} writes no text: it always paints, and calls no other tools",
            field="tools" if len(request.tools or []) > 1 else "tool_choice",
        )
    match [item for item in items if not (edits and isinstance(item, ImageCallItem))]:
        case [MessageItem(role="user", content=str(text))]:
            prompt = text
        case [MessageItem(role="user", content=list(parts)) as item] if (
            len(texts := [part.text for part in parts if isinstance(part, InputTextPart)])
            + (len(images_of(item)) if edits else 0)
        ) == len(parts):
            prompt = "".join(texts)
        case _:
            raise UnsupportedParameter(
                f"{request.model} paints the text of one user message, and reads no conversation",
                field="input",
            )
    if not prompt.strip():
        raise InvalidRequest("the input has no text to paint", field="input")
    return prompt
