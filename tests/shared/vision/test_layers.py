"""Towers with layers of ours against transformers' own, from the same weights."""

import copy
import weakref
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shared.errors import InvalidRequest
from shared.models.families.llava import LlavaTower
from shared.models.families.qwen_vl import grid_name, join_levels
from shared.models.registry import find_tower
from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from shared.native import tower_kernels, trials
from shared.native.choices import KernelSetting, Option
from shared.vision.layers import PatchEmbedding, attend_segments, optimize_qwen_vision, rotate
from shared.vision.packed_linears import ChosenKernels, PackedLinear, pack_linears
from tests import llava
from tests.engine.model.test_parity import build, widen
from tests.shared.native.test_measuring import write_record
from tests.shared.native.test_tower_kernels import needs_kernels

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
# Images of one size and of several sizes. Some cut the windows of Qwen2.5-VL at the edges; a window
# has 4 x 4 patches here.
BATCHES = [
    [(4, 4)],
    [(8, 8), (8, 8), (8, 8)],
    [(6, 10), (12, 4), (6, 10), (2, 2)],
    [(10, 14), (14, 10)],
]


def make_tower(family: str) -> Tower:
    model = build(family).eval().requires_grad_(False)
    widen(model)
    adapter = find_tower(model.config)
    assert adapter is not None
    return Tower(adapter, model)


def image(height: int, width: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (height * width, 3, 196)
    return {
        "pixel_patches": torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8),
        "pixel_table": torch.linspace(-2, 2, 256).expand(3, 256).contiguous(),
        "image_grid_thw": torch.tensor([1, height, width]),
    }


def images(sizes: list[tuple[int, int]]) -> list[Fields]:
    return [image(*size, seed) for seed, size in enumerate(sizes)]


@pytest.fixture(scope="module", params=FAMILIES)
def towers(request: pytest.FixtureRequest) -> tuple[Tower, Tower]:
    """transformers' own, and the same with our layers."""
    plain = make_tower(request.param)
    quick = copy.deepcopy(plain.model)
    plain.adapter.optimize_layers(quick)
    return plain, Tower(plain.adapter, quick)


@pytest.mark.parametrize("sizes", BATCHES)
def test_features_equal_the_features_of_transformers(
    towers: tuple[Tower, Tower], sizes: list[tuple[int, int]]
) -> None:
    plain, quick = towers
    batch = images(sizes)
    with torch.inference_mode():
        expected = plain.adapter.encode(plain.model, batch)
        actual = quick.adapter.encode(quick.model, batch)
    torch.testing.assert_close(actual, expected, atol=2e-4, rtol=1e-4)


def video(frames: int, height: int, width: int) -> dict[str, Tensor]:
    fields = image(frames * height, width)
    patches = fields["pixel_patches"]
    return {
        "video_patches": torch.cat([patches, patches.flip(0)], -1),
        "pixel_table": fields["pixel_table"],
        "video_grid_thw": torch.tensor([frames, height, width]),
    }


def mixed_batch() -> list[Fields]:
    return [video(3, 8, 8), image(4, 6), video(2, 6, 10), image(4, 6)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_features_by_cached_geometry_are_those_of_the_grids_bit_for_bit(
    towers: tuple[Tower, Tower], dtype: torch.dtype
) -> None:
    """In bfloat16 the table of the pixels' values is rounded, and not the values."""
    adapter: Any = towers[0].adapter
    plain: Any = towers[0].model
    model = copy.deepcopy(plain).to(dtype)
    for batch in (mixed_batch(), images(BATCHES[2]), mixed_batch()):
        pixel_values = torch.cat([adapter.restore(fields) for fields in batch])
        grids = torch.stack([fields[grid_name(fields)] for fields in batch])
        with torch.inference_mode():
            encoded = model.get_image_features(pixel_values, grids)
            actual = adapter.encode(model, batch)
        expected = encoded.pooler_output
        if adapter.num_levels:
            expected = join_levels(encoded)
        assert [*map(torch.equal, actual, expected)] == [True] * len(batch)


class Uploads(TorchDispatchMode):
    """Counts the copies of tensors from the CPU to the device `meta`."""

    num = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function.overloadpacket in (torch.ops.aten.to, torch.ops.aten._to_copy):
            self.num += (args[0].device.type, result.device.type) == ("cpu", "meta")
        return result


@torch.inference_mode()
def test_a_tower_never_waits_for_its_device(towers: tuple[Tower, Tower]) -> None:
    """A device without values has none to wait for. Pixels go there as bytes, with a table."""
    adapter = towers[1].adapter
    for visual, batch in product(towers, (mixed_batch(), images(BATCHES[2]))):
        model = copy.deepcopy(visual.model).to("meta")  # type: ignore[arg-type]
        adapter.encode(model, batch)
        with Uploads() as uploads:
            embeddings = adapter.encode(model, batch)
        assert [len(embedding) for embedding in embeddings] == [*map(adapter.count, batch)]
        assert {embedding.device.type for embedding in embeddings} == {"meta"}
        assert uploads.num == 2 * len(batch), "pixels and a table"


def off(actual: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    return float((torch.cat(list(actual)).float() - torch.cat(list(exact))).norm())


@pytest.mark.parametrize("kernels", ["torch", pytest.param("vector", marks=needs_kernels)])
def test_bfloat16_is_as_near_to_the_truth_as_in_transformers(
    towers: tuple[Tower, Tower], kernels: KernelSetting
) -> None:
    plain, _ = towers
    batch = images([(8, 8), (6, 10), (8, 8)])
    rough = copy.deepcopy(plain.model).bfloat16()
    with torch.inference_mode():
        exact = plain.adapter.encode(plain.model, batch)
        theirs = plain.adapter.encode(rough, batch)
        plain.adapter.optimize_layers(rough, kernels)
        ours = plain.adapter.encode(rough, batch)
    assert off(ours, exact) < 1.5 * off(theirs, exact)


@needs_kernels
def test_llava_in_bfloat16_is_as_near_to_the_truth_as_in_transformers(tmp_path: Path) -> None:
    model: Any = llava.write_model(tmp_path)
    widen(model)
    vision = LlavaTower(model.config)
    size = llava.IMAGE_SIZE
    batch: list[Fields] = [
        {
            "pixels": torch.randint(0, 256, (3, size, size), dtype=torch.uint8),
            "pixel_table": torch.linspace(-2, 2, 256).expand(3, 256).contiguous(),
        }
        for _ in range(3)
    ]
    rough = copy.deepcopy(model).bfloat16()
    with torch.inference_mode():
        exact, theirs = vision.encode(model, batch), vision.encode(rough, batch)
        vision.optimize_layers(rough, "vector")
        ours = vision.encode(rough, batch)
    assert off(ours, exact) < 1.5 * off(theirs, exact)
    assert_all_packed(rough.model.vision_tower, {"quick_gelu"})
    assert_all_packed(rough.model.multi_modal_projector, {"gelu"})


def assert_all_packed(module: nn.Module, activations: set[str]) -> None:
    """No linear has been left to torch, and no activation that it has before it."""
    packed = {m._activation for m in module.modules() if isinstance(m, PackedLinear)}
    assert packed == {"none"} | activations
    left = [type(m).__name__ for m in module.modules() if not list(m.children())]
    assert {name for name in left if "Linear" in name or "LU" in name} == {"PackedLinear"}


@needs_kernels
@pytest.mark.parametrize(
    ("family", "activations"),
    [
        ("qwen2_vl", {"quick_gelu", "gelu"}),
        ("qwen2_5_vl", {"silu", "gelu"}),
        ("qwen3_vl", {"gelu_tanh", "gelu"}),
    ],
)
def test_linears_are_packed_once_and_given_up(family: str, activations: set[str]) -> None:
    tower = make_tower(family)
    visual: Any = tower.model.bfloat16().model.visual
    weights = [weakref.ref(m.weight) for m in visual.modules() if isinstance(m, nn.Linear)]
    optimize_qwen_vision(visual, "vector")
    assert_all_packed(visual, activations)
    assert not any(weight() is not None for weight in weights)


@needs_kernels
def test_an_unknown_activation_is_applied_after_its_linear() -> None:
    (model := nn.Sequential(nn.Linear(4, 8), nn.Mish(), nn.Linear(8, 2))).bfloat16()
    x = torch.randn(5, 4).bfloat16()
    expected = model(x)
    kernels = tower_kernels.find_kernels(x)
    assert kernels is not None
    pack_linears(model, ChosenKernels(kernels, "vector", [model]))
    assert [type(m) for m in model] == [PackedLinear, nn.Mish, PackedLinear]
    torch.testing.assert_close(model(x), expected, atol=2e-2, rtol=2e-2)


@needs_kernels
def test_a_tower_runs_on_what_was_chosen_for_each_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    tower = make_tower("qwen2_vl")
    batch = images([(8, 8), (6, 10)])
    with torch.inference_mode():
        expected = tower.adapter.encode(tower.model, batch)
    visual: Any = tower.model.bfloat16().model.visual
    attention, fc1 = visual.blocks[0].attn, visual.blocks[0].mlp.fc1
    kernels = tower_kernels.find_kernels(fc1.weight)
    assert kernels is not None
    head_dim = attention.proj.in_features // attention.num_heads
    wide, narrow = fc1.out_features, fc1.in_features
    attend = trials.tower_attention(kernels, attention.num_heads, head_dim, attend_segments)
    widening = trials.tower_product(kernels, narrow, wide, "quick_gelu", lambda x: x)
    narrowing = trials.tower_product(kernels, wide, narrow, "none", lambda x: x)
    torch_wins, vector_wins = Option("torch"), Option("vector")
    chosen = {attend: torch_wins, widening: torch_wins, narrowing: vector_wins}
    write_record(tmp_path / "pagemill", kernels.key, chosen)
    optimize_qwen_vision(visual)
    for block in visual.blocks:
        assert block.attn.kernels is None
        assert type(block.mlp.fc1) is nn.Linear
        assert type(block.mlp.fc2) is PackedLinear
    with torch.inference_mode():
        actual = tower.adapter.encode(tower.model, batch)
    assert off(actual, expected) < 0.02 * float(torch.cat(expected).norm())


def test_an_image_is_the_same_in_any_company(
    towers: tuple[Tower, Tower], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch is too large to be run at once."""
    _, quick = towers
    sizes = [(8, 8), (10, 14), (8, 8), (4, 6), (16, 10), (2, 2)]
    batch = images(sizes)
    monkeypatch.setattr("shared.models.tower.CPU_RUN_LEN", 33)
    assert quick.adapter.count(batch[1]) > 33
    together = quick.encode(batch)
    for fields, embedding in zip(batch, together, strict=True):
        (alone,) = quick.encode([fields])
        torch.testing.assert_close(embedding, alone, atol=2e-4, rtol=1e-4)


def test_one_bad_image_fails_and_its_batch_can_continue_without_it(
    towers: tuple[Tower, Tower],
) -> None:
    _, quick = towers
    good, bad = image(4, 4), image(4, 4) | {"pixel_table": torch.full((3, 256), 3e38)}
    quick.adapter.check(bad)
    with pytest.raises(InvalidRequest, match="finite"):
        quick.encode([good, bad])
    quick.encode([good])


def test_no_weight_is_copied_or_changed() -> None:
    tower = make_tower("qwen2_5_vl")
    visual: Any = tower.model.model.visual
    before = {name: weight.data_ptr() for name, weight in visual.named_parameters()}
    optimize_qwen_vision(visual)
    assert {name: weight.data_ptr() for name, weight in visual.named_parameters()} == before


@pytest.mark.parametrize("bias", [False, True])
def test_a_patch_is_embedded_as_by_its_convolution(bias: bool) -> None:
    torch.manual_seed(0)
    convolution = nn.Conv3d(3, 32, (2, 14, 14), stride=(2, 14, 14), bias=bias)
    patches = torch.randn(20, 3 * 2 * 14 * 14)
    expected = convolution(patches.view(-1, 3, 2, 14, 14)).view(20, 32)
    torch.testing.assert_close(PatchEmbedding(convolution)(patches), expected, atol=1e-5, rtol=1e-5)


def test_rotation_is_by_halves_in_float32() -> None:
    torch.manual_seed(0)
    vectors = torch.randn(5, 2, 3, 8)
    angles = torch.randn(5, 4).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    left, right = vectors.chunk(2, -1)
    turned = torch.cat([-right, left], -1)
    expected = vectors * cos[:, None, None] + turned * sin[:, None, None]
    torch.testing.assert_close(rotate(vectors, cos, sin), expected)
    rough = rotate(vectors.bfloat16(), cos, sin)
    assert rough.dtype == torch.bfloat16
    torch.testing.assert_close(rough.float(), expected, atol=4e-2, rtol=2e-2)


@given(
    lengths=st.lists(st.sampled_from([1, 3, 4, 16, 40]), min_size=1, max_size=8),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    max_scores=st.sampled_from([50, 700, 2**20]),
)
def test_segments_see_themselves_only(
    lengths: list[int], dtype: torch.dtype, max_scores: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shared.vision.layers.MAX_SCORES", max_scores)
        torch.manual_seed(0)
        query, key, value = torch.randn(3, sum(lengths), 2, 8)
        actual = attend_segments(query.to(dtype), key.to(dtype), value.to(dtype), lengths, 0.4)
    start = 0
    for length in lengths:
        q, k, v = (t[start : start + length].transpose(0, 1) for t in (query, key, value))
        expected = ((q @ k.transpose(1, 2) * 0.4).softmax(-1) @ v).transpose(0, 1)
        tolerance = 1e-5 if dtype == torch.float32 else 5e-2
        torch.testing.assert_close(
            actual[start : start + length].float(), expected, atol=tolerance, rtol=tolerance
        )
        start += length
