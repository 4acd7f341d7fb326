"""Weights of a decoder in the layout of the C++ kernels."""

import ctypes
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from shared.models.language import LanguageAdapter
from shared.native.tower_kernels import PANEL
from workers.engine.cpu.memory import allocate
from workers.engine.model.support import layer_windows

_POINTER = ctypes.c_void_p


class Layer(ctypes.Structure):
    """Addresses of a layer's weights, as decoder.h has them."""

    _fields_ = (
        *((name, _POINTER) for name in ("qkv", "out", "gate_up", "down", "qkv_bias", "out_bias")),
        *((name, _POINTER) for name in ("input_norm", "post_norm", "query_norm", "key_norm")),
        ("window", ctypes.c_int32),
    )


class PackedWeights:
    """The weights of all layers and of the head; torch's copies of the layers are freed.

    The matrices are in one piece of memory, because most of them would not fill a huge page.
    """

    def __init__(self, family: LanguageAdapter, kernels: ctypes.CDLL, num_threads: int) -> None:
        decoder: Any = family.decoder
        model: Any = family.model
        self._kernels = kernels
        self._dtype: torch.dtype = model.dtype
        self._pinned: list[Tensor] = []
        """Small weights that the kernels read in place."""
        windows = layer_windows(decoder.config)
        self.layers: ctypes.Array[Layer] = (Layer * len(windows))()
        head = [model.get_output_embeddings().weight]
        layer_bytes = sum(
            self._packed_bytes(weights) for _, weights, _ in _matrices_of(decoder.layers[0])
        )
        num_bytes = len(windows) * layer_bytes
        self._memory = allocate(kernels, num_bytes + self._packed_bytes(head))
        start = ctypes.addressof(self._memory)
        self.head = start + num_bytes

        def take(index: int) -> None:
            to = self.layers[index]
            self._take_layer(decoder.layers[index], to, start + index * layer_bytes)
            to.window = windows[index] or 0
            decoder.layers[index] = torch.nn.Identity()

        with ThreadPoolExecutor(num_threads) as pool:
            packing = pool.submit(self._pack, head, PANEL, self.head)
            list(pool.map(take, range(len(windows))))
        packing.result()
        self.final_norm = self._pin(decoder.norm.weight)

    def _take_layer(self, layer: Any, to: Layer, memory: int) -> None:
        for name, weights, stride in _matrices_of(layer):
            setattr(to, name, memory)
            self._pack(weights, stride, memory)
            memory += self._packed_bytes(weights)
        attention = layer.self_attn
        if attention.q_proj.bias is not None:
            projections = (attention.q_proj, attention.k_proj, attention.v_proj)
            bias = torch.cat([projection.bias for projection in projections])
            to.qkv_bias = self._pin(torch.nn.functional.pad(bias, (0, -len(bias) % PANEL)))
        if attention.o_proj.bias is not None:
            to.out_bias = self._pin(attention.o_proj.bias)
        to.input_norm = self._pin(layer.input_layernorm.weight)
        to.post_norm = self._pin(layer.post_attention_layernorm.weight)
        if hasattr(attention, "q_norm"):
            to.query_norm = self._pin(attention.q_norm.weight)
            to.key_norm = self._pin(attention.k_norm.weight)

    def _pin(self, weight: Tensor) -> int:
        pinned = weight.detach().float().contiguous()
        self._pinned.append(pinned)
        return pinned.data_ptr()

    def _packed_bytes(self, weights: Sequence[Tensor]) -> int:
        num_outputs = sum(len(weight) for weight in weights)
        return -(-num_outputs // PANEL) * PANEL * weights[0].shape[1] * self._dtype.itemsize

    def _pack(self, weights: Sequence[Tensor], stride: int, memory: int) -> None:
        """Pack matrices one after the other or, with a stride of half a panel, interleaved."""
        first = 0
        for weight in weights:
            source = weight.detach().contiguous()
            self._kernels.pagemill_pack(
                self._dtype == torch.bfloat16,
                source.data_ptr(),
                len(source),
                source.shape[1],
                first,
                stride,
                memory,
            )
            first += len(source) if stride == PANEL else stride


def _matrices_of(layer: Any) -> list[tuple[str, list[Tensor], int]]:
    """Return the name in `Layer`, the weights and the stride of each matrix of a layer."""
    attention, mlp = layer.self_attn, layer.mlp
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    return [
        ("qkv", [projection.weight for projection in projections], PANEL),
        ("out", [attention.o_proj.weight], PANEL),
        ("gate_up", [mlp.gate_proj.weight, mlp.up_proj.weight], PANEL // 2),
        ("down", [mlp.down_proj.weight], PANEL),
    ]
