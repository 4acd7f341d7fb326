"""Rendered images of the comparison with vLLM: own hashes, equal pixels, perturbations."""

import base64
from typing import Any

import msgspec
import numpy as np

from ops.interop.renderings import FieldValue, equal_values, perturbed, values_of, with_own_hashes

BASE = np.full((6, 4), 100, np.uint8)


def body(pixels: Any) -> dict[str, Any]:
    data = ["uint8", list(pixels.shape), msgspec.msgpack.Ext(3, pixels.tobytes())]
    grid = ["int64", [1], msgspec.msgpack.Ext(3, np.array([6]).tobytes())]
    fields = {"grid": {"data": grid, "field": []}, "pixels": {"data": data, "field": []}}
    item = msgspec.msgpack.encode(fields)
    kwargs = {"image": [base64.b64encode(item).decode()]}
    return {"features": {"mm_hashes": {"image": ["a"]}, "kwargs_data": kwargs}}


def pixels_of(rendered: dict[str, Any]) -> Any:
    (item,) = rendered["features"]["kwargs_data"]["image"]
    return np.frombuffer(values_of(item)["pixels"].data, np.uint8).reshape(BASE.shape).astype(int)


def test_own_hashes_change_only_the_hashes() -> None:
    theirs, ours = body(BASE), with_own_hashes(body(BASE), "ours")
    assert ours["features"]["mm_hashes"] != theirs["features"]["mm_hashes"]
    assert with_own_hashes(theirs, "ours") == ours
    assert equal_values(ours, theirs)
    assert with_own_hashes({"features": None}, "ours") == {"features": None}


def test_a_perturbation_moves_the_differences_of_another_rendering() -> None:
    far = BASE.copy()
    far[1], far[4, 0] = [101, 100, 98, 100], 101
    theirs, ours = body(BASE), body(far)
    assert not equal_values(ours, theirs)
    moved = perturbed(theirs, ours, seed=3)
    differences = np.abs(pixels_of(moved) - BASE)
    rows = sorted(map(tuple, differences.tolist()))
    assert rows == sorted(map(tuple, np.abs(far.astype(int) - BASE).tolist()))
    assert moved["features"]["mm_hashes"] != theirs["features"]["mm_hashes"]
    assert moved == perturbed(theirs, ours, seed=3) != perturbed(theirs, ours, seed=4)


def test_steps_are_the_largest_difference() -> None:
    a, b = (FieldValue("uint8", (3,), bytes(data), []) for data in ([1, 2, 250], [1, 4, 251]))
    assert a.steps(b) == 2
