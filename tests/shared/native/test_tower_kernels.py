"""The C++ kernels of towers against torch in float32 with the same rounded inputs."""

from itertools import accumulate

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from shared.native import library, tower_kernels
from shared.native.matrices import PANEL, PackedMatrix
from shared.native.tower_kernels import TowerKernels
from shared.vision.layers import rotate

needs_kernels = pytest.mark.skipif(library.load() is None, reason="no compiler, or no AVX-512")
# The sizes of existing towers, one below a register, and one with an odd number of units.
HEAD_DIMS = [8, 16, 54, 64, 72, 80, 128]


@pytest.fixture(scope="module", params=[1, 3])
def kernels(request: pytest.FixtureRequest) -> TowerKernels:
    loaded = library.load()
    assert loaded is not None
    return TowerKernels(loaded, request.param)


def attend(
    qkv: Tensor, angles: tuple[Tensor, Tensor] | None, lengths: list[int], scale: float
) -> Tensor:
    """[num_rows, 3, num_heads, head_dim] -> [num_rows, num_heads, head_dim], one segment a time."""
    query, key, value = qkv.unbind(1)
    if angles is not None:
        query, key = rotate(query, *angles), rotate(key, *angles)
    parts = (t.float().transpose(0, 1).split(lengths, 1) for t in (query, key, value))
    segments = zip(*parts, strict=True)
    attended = [(q @ k.transpose(1, 2) * scale).softmax(-1) @ v for q, k, v in segments]
    return torch.cat(attended, 1).transpose(0, 1)


def starts(lengths: list[int]) -> Tensor:
    return torch.tensor([0, *accumulate(lengths)])


def assert_near(actual: Tensor, expected: Tensor) -> None:
    """Compare rows: an intermediate bfloat16 value has an error of at most 2**-9 of itself."""
    assert actual.dtype == torch.bfloat16
    assert actual.shape == expected.shape
    off = (actual.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    assert off.max() < 0.01


@needs_kernels
@given(
    lengths=st.lists(st.sampled_from([1, 2, 7, 12, 31, 32, 33, 64, 100]), min_size=1, max_size=9),
    num_heads=st.integers(1, 3),
    head_dim=st.sampled_from(HEAD_DIMS),
    turning=st.booleans(),
    seed=st.integers(0, 2**16),
)
@example(lengths=[1], num_heads=1, head_dim=64, turning=True, seed=0)
@example(lengths=[1001, 0, 200], num_heads=2, head_dim=80, turning=True, seed=0)
@example(lengths=[3] * 300, num_heads=2, head_dim=72, turning=False, seed=0)
def test_attention(
    kernels: TowerKernels,
    lengths: list[int],
    num_heads: int,
    head_dim: int,
    turning: bool,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    num_rows = sum(lengths)
    qkv = torch.randn(num_rows, 3, num_heads, head_dim).bfloat16()
    radians = torch.randn(num_rows, head_dim // 2).repeat(1, 2) * 3
    angles = (radians.cos(), radians.sin()) if turning else None
    # Sharp enough for each row to attend to few others.
    scale = 2 * head_dim**-0.5
    query, key, value = qkv.unbind(1)
    actual = kernels.attend(query, key, value, angles, starts(lengths), scale)
    assert_near(actual, attend(qkv, angles, lengths, scale))


EXACTLY = {
    "none": lambda x: x,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@needs_kernels
@given(
    num_rows=st.sampled_from([0, 1, 11, 12, 13, 50, 700]),
    num_inputs=st.sampled_from([2, 30, 64, 1000]),
    num_outputs=st.sampled_from([1, 31, 32, 33, 90, 160]),
    activation=st.sampled_from(tower_kernels.ACTIVATIONS),
    seed=st.integers(0, 2**16),
)
def test_products(
    kernels: TowerKernels,
    num_rows: int,
    num_inputs: int,
    num_outputs: int,
    activation: str,
    seed: int,
) -> None:
    torch.manual_seed(seed)
    x = torch.randn(num_rows, num_inputs).bfloat16()
    weight = (3 * num_inputs**-0.5 * torch.randn(num_outputs, num_inputs)).bfloat16()
    bias = F.pad(torch.randn(num_outputs), (0, -num_outputs % PANEL))
    packed = PackedMatrix(tower_kernels.pack_weight(weight))
    actual = kernels.multiply(x, packed, bias, num_outputs, activation)
    products = x.double() @ weight.double().T + bias[:num_outputs]
    assert actual.dtype == torch.bfloat16
    # Only the result is rounded, by at most 2**-9.
    expected = EXACTLY[activation](products).float()
    torch.testing.assert_close(actual.float(), expected, rtol=4e-3, atol=2e-5)


@needs_kernels
@pytest.mark.parametrize("activation", tower_kernels.ACTIVATIONS)
def test_activations_of_extreme_values(kernels: TowerKernels, activation: str) -> None:
    x = torch.cat([torch.linspace(-100, 100, 2001), torch.tensor([1e30, torch.nan])]).bfloat16()
    same = PackedMatrix(tower_kernels.pack_weight(torch.eye(2).bfloat16()))
    pairs = torch.stack([x, torch.zeros_like(x)], 1)
    actual = kernels.multiply(pairs, same, torch.zeros(32), 2, activation)
    expected = EXACTLY[activation](x.double()).float()
    torch.testing.assert_close(actual[:, 0].float(), expected, rtol=4e-3, atol=1e-5, equal_nan=True)


@needs_kernels
def test_nan_stays_within_its_segment(kernels: TowerKernels) -> None:
    qkv = torch.randn(90, 3, 2, 64).bfloat16()
    expected = attend(qkv, None, [40, 45, 5], 0.1)
    qkv[50, 1:] = torch.nan
    query, key, value = qkv.unbind(1)
    actual = kernels.attend(query, key, value, None, starts([40, 45, 5]), 0.1)
    assert_near(actual[:40], expected[:40])
    assert_near(actual[85:], expected[85:])
    assert actual[40:85].isnan().all()


@needs_kernels
def test_scores_that_overflow_exp(kernels: TowerKernels) -> None:
    qkv = 30 * torch.randn(50, 3, 1, 32).bfloat16()
    query, key, value = qkv.unbind(1)
    actual = kernels.attend(query, key, value, None, starts([50]), 1.0)
    assert_near(actual, attend(qkv, None, [50], 1.0))


@needs_kernels
@pytest.mark.parametrize("wrong", [[1, 10], [0, 9], [0, 7, 5, 10], [0, 11]])
def test_segments_must_cover_the_rows(kernels: TowerKernels, wrong: list[int]) -> None:
    qkv = torch.randn(10, 3, 1, 8).bfloat16()
    query, key, value = qkv.unbind(1)
    with pytest.raises(AssertionError):
        kernels.attend(query, key, value, None, torch.tensor(wrong), 1.0)


def test_unsupported_weights_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    rough = torch.empty(0, dtype=torch.bfloat16)
    assert tower_kernels.find_kernels(rough.float()) is None
    assert tower_kernels.find_kernels(rough.to("meta")) is None
    monkeypatch.setattr(library, "load", lambda: None)
    assert tower_kernels.find_kernels(rough) is None
