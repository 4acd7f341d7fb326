"""Pictures that come unprocessed beside token ids, which have one placeholder for each. Pure."""

from typing import Any

from shared.errors import UnsupportedContent
from shared.protocol.messages import ImagePart, ImageURL
from shared.protocol.renderer_rpc import RenderedFeatures
from workers.gateway.schemas.generate import PlaceholderInfo
from workers.gateway.vllm.errors import wrong
from workers.gateway.vllm.features import WireItem

_OTHERS = ("audio_url", "video_url")


def pictures_of(parts: list[dict[str, Any]]) -> list[ImagePart]:
    """Raises a RequestError for a part that is none."""
    return [_picture(part, f"content_parts[{i}]") for i, part in enumerate(parts)]


def _picture(part: dict[str, Any], path: str) -> ImagePart:
    kind, url = part.get("type"), part.get("url")
    if kind in _OTHERS:
        raise UnsupportedContent(f"{kind} is not supported by this model", field=f"body.{path}")
    if kind != "image_url" or not isinstance(url, str):
        raise wrong(path, "a part is of type image_url, and has a url")
    for name in part.keys() - {"type", "url"}:
        if part[name] is not None:
            raise wrong(f"{path}.{name}", f"{name} is not supported here")
    return ImagePart(ImageURL(url))


def placed(token_ids: list[int], rendered: RenderedFeatures) -> tuple[list[int], list[WireItem]]:
    """The prompt with as many tokens as each picture takes, and the pictures in their places.

    `rendered` has the pictures in another prompt. Raises InvalidRequest where there are more
    pictures than placeholders, or fewer.
    """
    runs = [
        rendered.prompt_token_ids[feature.placeholder.offset :][: feature.placeholder.length]
        for feature in rendered.features
    ]
    expanded: list[int] = []
    items: list[WireItem] = []
    markers = {run[0] for run in runs}
    for token_id in token_ids:
        if token_id not in markers:
            expanded.append(token_id)
            continue
        if len(items) == len(runs):
            raise wrong("content_parts", "token_ids have more placeholders than there are pictures")
        run, feature = runs[len(items)], rendered.features[len(items)]
        place = PlaceholderInfo(len(expanded), len(run))
        items.append(WireItem(feature.mm_hash, place, feature.kwargs_data))
        expanded += run
    if len(items) < len(runs):
        raise wrong("content_parts", "token_ids have fewer placeholders than there are pictures")
    return expanded, items
