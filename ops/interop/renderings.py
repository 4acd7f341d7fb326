"""Rendered media in the bodies of requests: their values, hashes and perturbations."""

import base64
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.int16]


@dataclass(frozen=True, slots=True)
class FieldValue:
    """The value of a field of an item: a tensor, or a list of numbers."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes
    kind: list[Any]
    """The way in which a server batches the field."""

    def steps(self, other: "FieldValue") -> float:
        """Return by how much two values of one type and shape are apart at most."""
        mine, others = (np.frombuffer(v.data, v.dtype) for v in (self, other))
        return float(np.abs(mine.astype(float) - others.astype(float)).max(initial=0))

    def summary(self) -> dict[str, Any]:
        """Return type, shape, kind and a hash, in the words of JSON."""
        digest = hashlib.sha256(self.data).hexdigest()
        return {"dtype": self.dtype, "shape": [*self.shape], "kind": self.kind, "sha256": digest}


def values_of(item: str) -> dict[str, FieldValue]:
    """Return the fields of an item by their names, in the order of the names."""
    fields = msgspec.msgpack.decode(base64.b64decode(item))
    return {name: _value(**field) for name, field in sorted(fields.items())}


def _value(data: list[Any], field: list[Any]) -> FieldValue:
    if data and isinstance(data[-1], msgspec.msgpack.Ext):
        dtype, shape, raw = data
        return FieldValue(dtype, tuple(shape), bytes(raw.data), field)
    numbers = np.array(data, np.float64)
    return FieldValue("float64", numbers.shape, numbers.tobytes(), field)


def with_own_hashes(body: dict[str, Any], owner: str) -> dict[str, Any]:
    """Return the body with hashes that no other owner's rendering of the same images has.

    Renderers give the same hash to pixels that differ by how they resize, and vLLM's engine reads
    the pixels of the first request with a hash only.
    """
    if body["features"] is None:
        return body
    hashes = {
        modality: [hashlib.sha256(f"{owner} {text}".encode()).hexdigest() for text in texts]
        for modality, texts in body["features"]["mm_hashes"].items()
    }
    return body | {"features": body["features"] | {"mm_hashes": hashes}}


def equal_values(ours: dict[str, Any], theirs: dict[str, Any]) -> bool:
    """Return whether all items of two bodies have the same values."""
    return all(
        mine[name].data == other[name].data
        for _, mine, other in pairs_of_values(ours, theirs)
        for name in mine
    )


def pairs_of_values(
    ours: dict[str, Any], theirs: dict[str, Any], column: str = "kwargs_data"
) -> Iterator[tuple[str, dict[str, FieldValue], dict[str, FieldValue]]]:
    """Yield the items of two bodies, or their metadata, in pairs with a name such as "video 0"."""
    for name, mine, other in _pairs(ours, theirs, column):
        yield name, values_of(mine), values_of(other)


def perturbed(body: dict[str, Any], other: dict[str, Any], seed: int) -> dict[str, Any]:
    """Return the body with the differences to another rendering, moved to random patches.

    The differences of a patch stay together, with a random sign. So they are as large, and as even
    over the patch and its frames, as the differences of the other rendering.
    """
    generator = np.random.default_rng(seed)
    items = [_perturbed_item(item, far, generator) for _, item, far in _pairs(body, other)]
    features = body["features"] | {"kwargs_data": {"image": items}}
    return with_own_hashes(body | {"features": features}, f"perturbed {seed}")


def _pairs(
    body: dict[str, Any], other: dict[str, Any], column: str = "kwargs_data"
) -> Iterator[tuple[str, str, str]]:
    if body["features"] is None or body["features"][column] is None:
        return
    data, far = body["features"][column], other["features"][column]
    for modality in data:
        for i, pair in enumerate(zip(data[modality], far[modality], strict=True)):
            yield f"{modality} {i}", *pair


def _perturbed_item(item: str, other: str, generator: np.random.Generator) -> str:
    fields, far = msgspec.msgpack.decode(base64.b64decode(item)), values_of(other)
    for name, field in fields.items():
        dtype, shape, raw = field["data"]
        if dtype != "uint8":
            continue
        pixels, differences = _pixels(raw.data, shape), _pixels(far[name].data, shape)
        differences -= pixels
        signs = generator.choice(np.array([-1, 1], np.int16), (len(pixels), 1))
        moved = pixels + generator.permutation(differences) * signs
        data = np.clip(moved, 0, 255).astype(np.uint8).tobytes()
        field["data"] = [dtype, shape, msgspec.msgpack.Ext(raw.code, data)]
    return base64.b64encode(msgspec.msgpack.encode(fields)).decode()


def _pixels(raw: bytes | memoryview, shape: list[int]) -> Pixels:
    return np.frombuffer(raw, np.uint8).astype(np.int16).reshape(shape)
