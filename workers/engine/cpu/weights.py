"""Weights of a decoder in the layout of the C++ kernels."""

import ctypes
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shared.models.language import LanguageAdapter
from shared.native.matrices import FP8_SCALE, PANEL, Format, Matrix
from workers.engine.cpu.memory import allocate
from workers.engine.model.quantized_linear import QuantizedLinear
from workers.engine.model.support import layer_windows

_POINTER = ctypes.c_void_p
_FORMATS = {
    torch.int8: Format.INT8,
    torch.float8_e4m3fn: Format.FP8,
    torch.uint8: Format.INT4,
}


class Layer(ctypes.Structure):
    """Addresses of a layer's weights, as decoder.h has them."""

    _fields_ = (
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, _POINTER) for name in ("qkv_bias", "out_bias", "input_norm", "post_norm")),
        *((name, _POINTER) for name in ("query_norm", "key_norm")),
        ("window", ctypes.c_int32),
    )


class Source(NamedTuple):
    """Modules whose weights become one matrix."""

    name: str
    """Name of the matrix in `Layer`."""
    modules: Sequence[Any]
    stride: int = PANEL
    """With half a panel, outputs of two modules that are needed together share panels."""

    @property
    def form(self) -> tuple[Format, int]:
        """The format, and the number of inputs that share a scale."""
        forms = set(map(_form, self.modules))
        if len(forms) > 1:
            return Format.FULL, 0
        ((form, group_size),) = forms
        if form == Format.INT4 and any(module.zero is not None for module in self.modules):
            form = Format.INT4_ZEROS
        return form, group_size

    def parts(self, dtype: torch.dtype) -> Iterator[tuple[str, list[Tensor]]]:
        """Yield each field of `Matrix` with the rows to pack, in items of 1 or 4 bytes."""
        form, _ = self.form
        if form == Format.FULL:
            weights = [_values(module, dtype).detach().contiguous() for module in self.modules]
            yield "panels", [weight.view(torch.int32) for weight in weights]
            return
        yield "panels", [module.weight.view(torch.uint8) for module in self.modules]
        factor = FP8_SCALE if form == Format.FP8 else 1
        yield "scales", [module.scale * factor for module in self.modules]
        if form == Format.INT4_ZEROS:
            pairs = [(module.zero, module.scale) for module in self.modules]
            yield "zeros", [torch.zeros_like(s) if zero is None else zero for zero, s in pairs]

    def num_bytes(self, dtype: torch.dtype) -> int:
        """Return the size of the packed matrix and its scales."""
        form, group_size = self.form
        num_inputs: int = self.modules[0].in_features
        if form == Format.FULL:
            row_bytes = num_inputs * dtype.itemsize
        else:
            num_scales = -(-num_inputs // group_size) * (2 if form == Format.INT4_ZEROS else 1)
            row_bytes = num_inputs // form.inputs_per_byte + 4 * num_scales
        return _padded(sum(module.out_features for module in self.modules)) * row_bytes


def _form(module: Any) -> tuple[Format, int]:
    if isinstance(module, QuantizedLinear):
        return _FORMATS[module.weight.dtype], module.group_size
    return Format.FULL, 0


def _values(module: Any, dtype: torch.dtype) -> Tensor:
    weight: Tensor = module.weight
    return module.values().to(dtype) if isinstance(module, QuantizedLinear) else weight


def _padded(num_outputs: int) -> int:
    return -(-num_outputs // PANEL) * PANEL


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
        self.head = Matrix()
        head = Source("head", [model.get_output_embeddings()])
        middle = decoder.layers[len(windows) // 2]
        self.forms = {source.name: source.form for source in (*_sources_of(middle), head)}
        """Forms of the matrices of a layer, and of the head."""
        sizes = [
            sum(source.num_bytes(self._dtype) for source in _sources_of(layer))
            for layer in decoder.layers
        ]
        self.num_bytes = sum(sizes) + head.num_bytes(self._dtype)
        """Memory of the matrices."""
        self._memory = allocate(kernels, self.num_bytes)
        start = ctypes.addressof(self._memory)

        def take(index: int) -> None:
            to = self.layers[index]
            self._take_layer(decoder.layers[index], to, start + sum(sizes[:index]))
            to.window = windows[index] or 0
            decoder.layers[index] = torch.nn.Identity()

        with ThreadPoolExecutor(num_threads) as pool:
            packing = pool.submit(self._pack, head, self.head, start + sum(sizes))
            list(pool.map(take, range(len(windows))))
        packing.result()
        self.final_norm = self._pin(decoder.norm.weight)

    def _take_layer(self, layer: Any, to: Layer, memory: int) -> None:
        for source in _sources_of(layer):
            memory = self._pack(source, getattr(to, source.name), memory)
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

    def _pack(self, source: Source, to: Matrix, memory: int) -> int:
        """Pack modules one after the other or, with a stride of half a panel, interleaved.

        Return the first address after them.
        """
        to.format, to.group_size = source.form
        for field, parts in source.parts(self._dtype):
            setattr(to, field, memory)
            first = 0
            for rows in parts:
                self._kernels.pagemill_pack(
                    rows.itemsize, rows.data_ptr(), *rows.shape, first, source.stride, memory
                )
                first += len(rows) if source.stride == PANEL else source.stride
            memory += _padded(sum(map(len, parts))) * parts[0].shape[1] * parts[0].itemsize
        return memory


def _sources_of(layer: Any) -> list[Source]:
    attention, mlp = layer.self_attn, layer.mlp
    return [
        Source("qkv", [attention.q_proj, attention.k_proj, attention.v_proj]),
        Source("out", [attention.o_proj]),
        Source("gate_up", [mlp.gate_proj, mlp.up_proj], PANEL // 2),
        Source("down", [mlp.down_proj]),
    ]
