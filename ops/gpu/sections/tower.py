"""The tower of Qwen2-VL with random weights: results of the CPU, and shares of the matrix rate."""

import time
from functools import partial
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedModel

from ops.gpu.models import build, image_fields
from ops.gpu.session import Session, relative_error
from ops.gpu.timing import matrix_rate, watch_device
from shared.models import registry
from shared.models.tower import Tower
from shared.vision.layers import PatchEmbedding

WIDTH, DEPTH = 1280, 32
NUM_RUNS = 5
LARGEST_ERROR = 1e-4
GOAL = "of_product >= 0.6"
BATCHES = {
    "448 x 448": [(32, 32)],
    "8 of 448 x 448": [(32, 32)] * 8,
    "8 of several sizes": [(32, 32 + 2 * i) for i in range(8)],
    "1280 x 720": [(52, 92)],
}
WITH_GOAL = ("8 of 448 x 448", "1280 x 720")


def run(session: Session) -> None:
    session.attempt("tower as on a CPU, fp32", partial(_compare_devices, session))
    if not session.dry:
        session.attempt("times of the tower", partial(_measure, session))


def _compare_devices(session: Session) -> None:
    model = _build(session, torch.device("cpu"), torch.float32, depth=2)
    small = [image_fields(4, 6), image_fields(4, 4)]
    expected = _make_tower(model).encode(small)
    actual = _make_tower(model.to(session.device)).encode(small)  # type: ignore[arg-type]
    error = max(
        relative_error(there.cpu(), here) for there, here in zip(actual, expected, strict=True)
    )
    session.add("tower as on a CPU, fp32", error < LARGEST_ERROR, error=error)


def _build(
    session: Session, device: torch.device, dtype: torch.dtype, depth: int
) -> PreTrainedModel:
    """Return a model with a tower of full width, and a decoder that is not used."""
    size = {"embed_dim": WIDTH, "num_heads": 16, "mlp_ratio": 4}
    torch.manual_seed(0)
    with device:
        model: Any = build("qwen2_vl", depth=depth, **({} if session.dry else size))
    built: PreTrainedModel = model.to(dtype)
    return built


def _make_tower(model: Any) -> Tower:
    adapter = registry.find_tower(model.config)
    assert adapter is not None
    if not isinstance(model.model.visual.patch_embed, PatchEmbedding):
        adapter.optimize_layers(model, "torch")
    return Tower(adapter, model)


def _measure(session: Session) -> None:
    rate = matrix_rate(session.device)
    tower = _make_tower(_build(session, session.device, session.dtype, DEPTH))
    model: Any = tower.model
    blocks = model.model.visual.blocks
    num_weights = sum(weight.numel() for weight in blocks.parameters() if weight.ndim == 2)
    adapter: Any = tower.adapter
    for name, sizes in BATCHES.items():
        batch = [image_fields(*size) for size in sizes]
        times, lookups = [], []
        for _ in range(NUM_RUNS):
            session.synchronize()
            began_s = time.perf_counter()
            tower.encode(batch)
            session.synchronize()
            times.append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            for fields in batch:
                adapter.restore(fields, model.model.visual)
            session.synchronize()
            lookups.append(time.perf_counter() - began_s)
        lengths = [height * width for height, width in sizes]
        num_flops = 2 * num_weights * sum(lengths)
        num_flops += 4 * DEPTH * WIDTH * sum(length**2 for length in lengths)
        values: dict[str, object] = {
            "ms": median(times) * 1e3,
            "of_product": num_flops / median(times) / rate,
            "pixels_ms": median(lookups) * 1e3,
            "idle": watch_device(partial(tower.encode, batch)),
        }
        if name in WITH_GOAL:
            values["goal"] = GOAL
        session.add(f"tower, {name}", **values)
