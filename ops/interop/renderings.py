"""Rendered images in the bodies of requests: their pixels, hashes and perturbations."""

import base64
import hashlib
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.int16]


def tensors(item: str) -> dict[str, Any]:
    """Return the tensors of an item: name to type, shape and bytes."""
    fields = msgspec.msgpack.decode(base64.b64decode(item))
    return {name: field["data"] for name, field in fields.items()}


def steps(ours: msgspec.msgpack.Ext, theirs: msgspec.msgpack.Ext) -> int:
    """Return by how much two tensors of bytes are apart at most."""
    pixels = (np.frombuffer(bytes(raw.data), np.uint8).astype(int) for raw in (ours, theirs))
    mine, other = pixels
    return int(np.abs(mine - other).max())


def with_own_hashes(body: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the body with hashes that no other owner's rendering of the same images has.

    Renderers give the same hash to pixels that differ by how they resize, and vLLM's engine reads
    the pixels of the first request with a hash only.
    """
    if body["features"] is None:
        return body
    hashes = {
        modality: [hashlib.sha256(f"{owner} {one}".encode()).hexdigest() for one in ones]
        for modality, ones in body["features"]["mm_hashes"].items()
    }
    return body | {"features": body["features"] | {"mm_hashes": hashes}}


def equal_pixels(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    return all(tensors(mine) == tensors(other) for mine, other in _pairs(ours, theirs))


def perturbed(body: dict[str, Any], other: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the body with the differences to another rendering, moved to random patches.

    A patch's differences stay together, with a random sign, so that they are as large and as even
    over the patch and its frames as those of the other rendering.
    """
    generator = np.random.default_rng(seed)
    items = [_perturbed_item(item, far, generator) for item, far in _pairs(body, other)]
    features = body["features"] | {"kwargs_data": {"image": items}}
    return with_own_hashes(body | {"features": features}, f"perturbed {seed}")


def _pairs(one: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, str]]:
    if one["features"] is None:
        return iter(())
    return zip(*(body["features"]["kwargs_data"]["image"] for body in (one, other)), strict=True)


def _perturbed_item(item: str, other: str, generator: np.random.Generator) -> str:
    fields, far = msgspec.msgpack.decode(base64.b64decode(item)), tensors(other)
    for name, field in fields.items():
        dtype, shape, raw = field["data"]
        if dtype != "uint8":
            continue
        pixels, differences = _pixels(raw, shape), _pixels(far[name][2], shape)
        differences -= pixels
        signs = generator.choice(np.array([-1, 1], np.int16), (len(pixels), 1))
        moved = pixels + generator.permutation(differences) * signs
        data = np.clip(moved, 0, 255).astype(np.uint8).tobytes()
        field["data"] = [dtype, shape, msgspec.msgpack.Ext(raw.code, data)]
    return base64.b64encode(msgspec.msgpack.encode(fields)).decode()


def _pixels(raw: msgspec.msgpack.Ext, shape: list[int]) -> Pixels:
    return np.frombuffer(bytes(raw.data), np.uint8).astype(np.int16).reshape(shape)
