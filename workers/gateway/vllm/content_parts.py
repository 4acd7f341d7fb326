"""Unprocessed images beside token ids that have one placeholder for each. Pure."""

from typing import Any

from shared.errors import UnsupportedContent
from shared.protocol.renderer_rpc import RenderedFeatures
from shared.protocol.requests import ImagePart, ImageURL
from workers.gateway.schemas.generate import PlaceholderInfo
from workers.gateway.vllm.errors import body_error
from workers.gateway.vllm.features import WireItem

_UNSUPPORTED = ("audio_url", "video_url")


def images_of(parts: list[dict[str, Any]]) -> list[ImagePart]:
    """Raises a RequestError for a part that is not an image."""
    return [_image(part, f"content_parts[{i}]") for i, part in enumerate(parts)]


def _image(part: dict[str, Any], path: str) -> ImagePart:
    kind, url = part.get("type"), part.get("url")
    if kind in _UNSUPPORTED:
        raise UnsupportedContent(f"{kind} is not supported by this model", field=f"body.{path}")
    if kind != "image_url" or not isinstance(url, str):
        raise body_error(path, "a part must be of type image_url and have a url")
    for name in part.keys() - {"type", "url"}:
        if part[name] is not None:
            raise body_error(f"{path}.{name}", f"{name} is not supported here")
    return ImagePart(ImageURL(url))


def insert_images(
    token_ids: list[int], rendered: RenderedFeatures
) -> tuple[list[int], list[WireItem]]:
    """Return the prompt with every placeholder expanded to its image's tokens, and the images.

    `rendered` has the images in another prompt. Raises InvalidRequest where the numbers of images
    and placeholders differ.
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
            raise body_error(
                "content_parts", "token_ids have more placeholders than there are images"
            )
        run, feature = runs[len(items)], rendered.features[len(items)]
        place = PlaceholderInfo(len(expanded), len(run))
        items.append(WireItem(feature.mm_hash, place, feature.kwargs_data))
        expanded += run
    if len(items) < len(runs):
        raise body_error("content_parts", "token_ids have fewer placeholders than there are images")
    return expanded, items
