"""Norms, activations, rotary positions and the write into the cache against torch's own."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaConfig, Qwen2VLTextConfig, Qwen3VLTextConfig
from transformers.models.llama.modeling_llama import (
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from workers.engine.cuda.kernels.activation import silu_mul
from workers.engine.cuda.kernels.norm import add_rms_norm, rms_norm
from workers.engine.cuda.kernels.rotary import HeadNorm, Rotary, rotate_and_write, tabulate_rotary

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
EPS = 1e-6


def close(actual: Tensor, expected: Tensor) -> None:
    tolerance = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}[expected.dtype]
    torch.testing.assert_close(actual.cpu(), expected.cpu(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(5, 96), (1, 1536), (2, 3, 80)])
def test_norm_equals_the_norm_of_llama(
    device: torch.device, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    torch.manual_seed(0)
    x, residual = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    norm = LlamaRMSNorm(shape[-1], EPS).to(device, dtype)
    norm.weight.data.uniform_(-2, 2)
    close(rms_norm(x, norm.weight, EPS), norm(x))
    normed, total = add_rms_norm(x, residual, norm.weight, EPS)
    close(total, residual + x)
    close(normed, norm(residual + x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [48, 1500])
def test_silu_mul(device: torch.device, dtype: torch.dtype, size: int) -> None:
    torch.manual_seed(0)
    gate_up = 4 * torch.randn(3, 2 * size, device=device).to(dtype)
    gate, up = gate_up.chunk(2, dim=1)
    close(silu_mul(gate_up), F.silu(gate) * up)


def rope_modules() -> dict[str, tuple[torch.nn.Module, int]]:
    """Rotary embeddings for heads of 32, and of how many axes their positions are."""
    shape: dict[str, Any] = {"hidden_size": 128, "num_attention_heads": 4}
    mrope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 6, 6]}
    llama3: dict[str, Any] = {
        "rope_type": "llama3",
        "rope_theta": 1e4,
        "factor": 4.0,
        "low_freq_factor": 1.0,
    }
    llama3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    # The parameter is annotated as the whole model's configuration.
    qwen2_vl: Any = Qwen2VLTextConfig(**shape, rope_parameters=mrope)
    return {
        "plain": (LlamaRotaryEmbedding(LlamaConfig(**shape)), 1),
        "scaled": (LlamaRotaryEmbedding(LlamaConfig(**shape, rope_parameters=llama3)), 1),
        "sections": (Qwen2VLRotaryEmbedding(qwen2_vl), 3),
        "interleaved": (
            Qwen3VLTextRotaryEmbedding(
                Qwen3VLTextConfig(
                    **shape, head_dim=32, rope_parameters=mrope | {"mrope_interleaved": True}
                )
            ),
            3,
        ),
    }


class Strict:
    """A rotary module that refuses what those of the oldest supported transformers refuse."""

    def __init__(self, module: Any, num_axes: int) -> None:
        self._module = module
        self._num_dims = 2 if num_axes == 1 else 3

    def __call__(self, like: Tensor, positions: Tensor) -> Any:
        if positions.ndim != self._num_dims:
            raise IndexError("too many indices for tensor")
        return self._module(like, positions)


@pytest.mark.parametrize("norms_heads", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["plain", "scaled", "sections", "interleaved"])
def test_rotation_equals_transformers_and_is_stored_in_its_slots(
    device: torch.device, kind: str, dtype: torch.dtype, norms_heads: bool
) -> None:
    torch.manual_seed(0)
    module, num_axes = rope_modules()[kind]
    num_heads, num_kv_heads, head_dim = 4, 2, 32
    qkv = torch.randn(5, num_heads + 2 * num_kv_heads, head_dim, device=device).to(dtype)
    positions = torch.randint(100, (num_axes, 5), device=device)
    query, key, value = qkv.clone().split([num_heads, num_kv_heads, num_kv_heads], dim=1)
    norm = None
    if norms_heads:
        norms = [LlamaRMSNorm(head_dim, EPS).to(device, dtype) for _ in range(2)]
        for head_norm in norms:
            head_norm.weight.data.uniform_(-2, 2)
        norm = HeadNorm(torch.stack([item.weight.data for item in norms]), EPS)
        query, key = norms[0](query), norms[1](key)
    module = module.to(device)
    cos, sin = module(query, positions if num_axes == 1 else positions[:, None])
    query, key = apply_rotary_pos_emb(query[None], key[None], cos, sin, unsqueeze_dim=2)

    caches = torch.zeros(2, 4, 2, num_kv_heads, head_dim, dtype=dtype, device=device)
    slots = torch.tensor([6, 0, -1, 3, 7], dtype=torch.int32, device=device)
    rotary = tabulate_rotary(Strict(module, num_axes), 100, num_axes, qkv)
    turned = rotate_and_write(qkv, positions, rotary, caches[0], caches[1], slots, norm)
    close(turned, query[0])
    written = [0, 1, 3, 4]
    key_cache, value_cache = caches.flatten(1, 2)
    close(key_cache[[6, 0, 3, 7]], key[0, written])
    assert torch.equal(value_cache[[6, 0, 3, 7]], value[written])
    assert not caches.flatten(1, 2)[:, [1, 2, 4, 5]].any()


@pytest.mark.parametrize("position", [8, 1000, 2**31, 2**62, -1, -(2**62)])
def test_no_position_reads_outside_of_the_rotary_table(device: torch.device, position: int) -> None:
    """The rows around the table belong to this test: a read of theirs changes the result."""
    head_dim, first, num_positions = 32, 4096, 8
    memory = torch.full((3 * first, head_dim // 2), 7.0, device=device)
    cos = memory[first : first + num_positions]
    cos[:] = torch.arange(1.0, num_positions + 1, device=device)[:, None]
    axes = torch.zeros(head_dim // 2, dtype=torch.int32, device=device)
    caches = torch.zeros(2, 1, 4, 1, head_dim, device=device)
    rotated = rotate_and_write(
        torch.ones(1, 3, head_dim, device=device),
        torch.full((1, 1), position, device=device),
        Rotary(cos, torch.zeros_like(memory)[first : first + num_positions], axes),
        caches[0],
        caches[1],
        torch.zeros(1, dtype=torch.int32, device=device),
    )
    nearest = cos[-1] if position > 0 else cos[0]
    close(rotated[0, 0], nearest.repeat(2))
    close(caches[0, 0, 0, 0], nearest.repeat(2))
