"""Media of the token protocol. Pure.

They are either rendered items, which are checked here, or images that no renderer has processed.
For such images the prompt has one placeholder token each.
"""

import base64
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, get_args

import msgspec

from shared.errors import InvalidRequest, UnsupportedContent
from shared.helpers.validation import reason_of
from shared.protocol.multimodal import IMAGE, Modality
from shared.protocol.renderer_rpc import RenderedFeature, RenderedFeatures
from shared.protocol.requests import ImagePart, ImageURL
from shared.protocol.value_limits import check_msgpack
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.generate import FeaturesInfo, PlaceholderInfo
from workers.gateway.vllm.errors import body_error

T = TypeVar("T")

_UNSUPPORTED = ("audio_url", "video_url")
_decode_item = msgspec.msgpack.Decoder().decode
_encode_item = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class WireItem:
    """An image, video or sound of the prompt, as a renderer has processed it."""

    modality: Modality
    mm_hash: str
    place: PlaceholderInfo
    data: bytes | None
    """None for an item that is sent by its hash alone."""


def check_features(features: FeaturesInfo) -> None:
    """Raises a RequestError for inconsistent features, and for unsupported modalities."""
    _check_ranges(features)
    modalities = set(features.mm_hashes)
    if set(features.mm_placeholders) != modalities:
        raise body_error("features", "mm_hashes and mm_placeholders must use the same modalities")
    for name in ("kwargs_data", "mm_metadata"):
        column = getattr(features, name)
        if column is not None and set(column) != modalities:
            raise body_error("features", f"{name} must use the same modalities as mm_hashes")
    for modality, hashes in features.mm_hashes.items():
        _check_lengths(features, modality, len(hashes))
    places = itertools.chain.from_iterable(features.mm_placeholders.values())
    ranges = sorted((place.offset, place.offset + place.length) for place in places)
    if any(start < end for (_, end), (start, _) in itertools.pairwise(ranges)):
        raise body_error("features", "mm_placeholders must be globally non-overlapping and sorted")
    for modality in modalities - set(get_args(Modality)):
        raise UnsupportedParameter(
            f"items of modality {modality!r} are not supported here",
            field=f"body.features.mm_hashes.{modality}",
        )


def _check_ranges(features: FeaturesInfo) -> None:
    for modality, places in features.mm_placeholders.items():
        for i, place in enumerate(places):
            path = f"features.mm_placeholders.{modality}.{i}"
            if place.offset < 0:
                raise body_error(f"{path}.offset", "offset: must be at least 0")
            if place.length <= 0:
                raise body_error(f"{path}.length", "length: must be at least 1")


def _check_lengths(features: FeaturesInfo, modality: str, length: int) -> None:
    if len(features.mm_placeholders[modality]) != length:
        raise body_error(
            "features", f"{modality} mm_hashes and mm_placeholders must have the same length"
        )
    for name in ("kwargs_data", "mm_metadata"):
        column = getattr(features, name)
        if column is not None and len(column[modality]) != length:
            raise body_error(
                "features", f"{modality} {name} and mm_hashes must have the same length"
            )


def items_of(features: FeaturesInfo) -> list[WireItem]:
    """Return the items in the order of the prompt."""
    items = [
        item
        for modality in get_args(Modality)
        if modality in features.mm_hashes
        for item in _items_of_modality(features, modality)
    ]
    return sorted(items, key=lambda item: item.place.offset)


def _items_of_modality(features: FeaturesInfo, modality: Modality) -> list[WireItem]:
    hashes, places = features.mm_hashes[modality], features.mm_placeholders[modality]
    absent: list[str | None] = [None] * len(hashes)
    data = (features.kwargs_data or {}).get(modality, absent)
    metadata = (features.mm_metadata or {}).get(modality, absent)
    return [
        WireItem(
            modality,
            mm_hash,
            place,
            _item_bytes(f"body.features.kwargs_data.{modality}.{i}", data[i], metadata[i]),
        )
        for i, (mm_hash, place) in enumerate(zip(hashes, places, strict=True))
    ]


def _item_bytes(field: str, data: str | None, metadata: str | None) -> bytes | None:
    """Return the item. Fields of its metadata replace fields of the same name."""
    if data is None:
        return None
    item = _decode_base64(data, field)
    if metadata is None:
        return item
    overrides = _decode_map(
        _decode_base64(metadata, field.replace("kwargs_data", "mm_metadata")), field
    )
    fields = _decode_map(item, field)
    return item if fields | overrides == fields else _encode_item(fields | overrides)


def _decode_base64(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as error:
        raise InvalidRequest("must be base64", field=field) from error


def _decode_map(item: bytes, field: str) -> dict[Any, Any]:
    try:
        check_msgpack(item)
        decoded = _decode_item(item)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not an item in msgpack: {reason_of(error)}", field=field) from error
    if not isinstance(decoded, dict):
        raise InvalidRequest("not an item in msgpack: it is not a map", field=field)
    return decoded


def features_of(rendered: Sequence[RenderedFeature], *, with_tensors: bool) -> FeaturesInfo | None:
    """Return the items of a rendered prompt by modality, or None if there are none."""
    if not rendered:
        return None
    by_modality: dict[str, list[RenderedFeature]] = {}
    for feature in rendered:
        by_modality.setdefault(feature.modality, []).append(feature)

    def column(read: Callable[[RenderedFeature], T]) -> dict[str, list[T]]:
        return {modality: [read(f) for f in items] for modality, items in by_modality.items()}

    has_metadata = any(feature.mm_metadata is not None for feature in rendered)
    return FeaturesInfo(
        mm_hashes=column(lambda f: f.mm_hash),
        mm_placeholders=column(
            lambda f: PlaceholderInfo(f.placeholder.offset, f.placeholder.length)
        ),
        kwargs_data=column(lambda f: _encode_base64(f.kwargs_data)) if with_tensors else None,
        mm_metadata=column(lambda f: _encode_base64(f.mm_metadata)) if has_metadata else None,
    )


def _encode_base64(data: bytes | None) -> str | None:
    return None if data is None else base64.b64encode(data).decode()


def images_of(parts: Sequence[Mapping[str, object]]) -> list[ImagePart]:
    """Raises a RequestError for a part that is not an image."""
    return [_image(part, f"content_parts[{i}]") for i, part in enumerate(parts)]


def _image(part: Mapping[str, object], path: str) -> ImagePart:
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
    """Return the prompt with the tokens of an image in place of each placeholder, and the images.

    `rendered` has the same images, rendered in another prompt. Raises InvalidRequest if the number
    of placeholders is not the number of images.
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
        items.append(WireItem(IMAGE, feature.mm_hash, place, feature.kwargs_data))
        expanded += run
    if len(items) < len(runs):
        raise body_error("content_parts", "token_ids have fewer placeholders than there are images")
    return expanded, items
