"""Pictures in a generate body: what must hold of them together, and their bytes. Pure."""

import base64
import binascii
import itertools
from dataclasses import dataclass
from typing import Any

import msgspec

from shared.errors import InvalidRequest
from shared.protocol.multimodal import IMAGE
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.schemas.generate import FeaturesInfo, PlaceholderInfo
from workers.gateway.vllm.errors import wrong

_decode_item = msgspec.msgpack.Decoder().decode
_encode_item = msgspec.msgpack.Encoder().encode


@dataclass(frozen=True, slots=True)
class WireItem:
    """A picture of the prompt, as somebody else has processed it."""

    mm_hash: str
    place: PlaceholderInfo
    data: bytes | None
    """None for one that is known by its hash."""


def check_features(features: FeaturesInfo) -> None:
    """Raises a RequestError for what does not belong together, or is no picture."""
    _check_ranges(features)
    modalities = set(features.mm_hashes)
    if set(features.mm_placeholders) != modalities:
        raise wrong("features", "mm_hashes and mm_placeholders must use the same modalities")
    for name in ("kwargs_data", "mm_metadata"):
        told = getattr(features, name)
        if told is not None and set(told) != modalities:
            raise wrong("features", f"{name} must use the same modalities as mm_hashes")
    for modality, hashes in features.mm_hashes.items():
        _check_lengths(features, modality, len(hashes))
    places = [place for told in features.mm_placeholders.values() for place in told]
    ranges = sorted((place.offset, place.offset + place.length) for place in places)
    if any(start < end for (_, end), (start, _) in itertools.pairwise(ranges)):
        raise wrong("features", "mm_placeholders must be globally non-overlapping and sorted")
    for modality in modalities - {IMAGE}:
        raise UnsupportedParameter(
            f"items of modality {modality!r} are not supported here",
            field=f"body.features.mm_hashes.{modality}",
        )


def _check_ranges(features: FeaturesInfo) -> None:
    for modality, places in features.mm_placeholders.items():
        for i, place in enumerate(places):
            path = f"features.mm_placeholders.{modality}.{i}"
            if place.offset < 0:
                raise wrong(f"{path}.offset", "Input should be greater than or equal to 0")
            if place.length <= 0:
                raise wrong(f"{path}.length", "Input should be greater than 0")


def _check_lengths(features: FeaturesInfo, modality: str, length: int) -> None:
    if len(features.mm_placeholders[modality]) != length:
        raise wrong(
            "features", f"{modality} mm_hashes and mm_placeholders must have the same length"
        )
    for name in ("kwargs_data", "mm_metadata"):
        told = getattr(features, name)
        if told is not None and len(told[modality]) != length:
            raise wrong("features", f"{modality} {name} and mm_hashes must have the same length")


def items_of(features: FeaturesInfo) -> list[WireItem]:
    """In the order of the prompt."""
    hashes = features.mm_hashes.get(IMAGE, [])
    nothing: list[str | None] = [None] * len(hashes)
    data = (features.kwargs_data or {}).get(IMAGE, nothing)
    metadata = (features.mm_metadata or {}).get(IMAGE, nothing)
    items = [
        WireItem(mm_hash, place, _item_bytes(i, data[i], metadata[i]))
        for i, (mm_hash, place) in enumerate(
            zip(hashes, features.mm_placeholders.get(IMAGE, []), strict=True)
        )
    ]
    return sorted(items, key=lambda item: item.place.offset)


def _item_bytes(index: int, data: str | None, metadata: str | None) -> bytes | None:
    """The item, overlaid with what its metadata say otherwise."""
    if data is None:
        return None
    field = f"body.features.kwargs_data.{IMAGE}.{index}"
    item = _unpacked(data, field)
    if metadata is None:
        return item
    other = _decoded(_unpacked(metadata, field.replace("kwargs_data", "mm_metadata")), field)
    mine = _decoded(item, field)
    return item if mine | other == mine else _encode_item(mine | other)


def _unpacked(text: str, field: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(f"not base64: {error}", field=field) from error


def _decoded(item: bytes, field: str) -> dict[Any, Any]:
    try:
        fields = _decode_item(item)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise InvalidRequest(f"not an item in msgpack: {error}", field=field) from error
    if not isinstance(fields, dict):
        raise InvalidRequest("not an item in msgpack: it is no map", field=field)
    return fields
