"""C++ kernels for vision towers, on bfloat16 CPU tensors."""

import ctypes
import functools
import math
from pathlib import Path

import torch
from torch import Tensor

from shared.native import library
from shared.native.choices import NEVER
from shared.native.matrices import PANEL, Matrix, PackedMatrix, pack_rows
from shared.native.measuring import MachineKey

MAX_HEAD_DIM = 512
TILE_ROWS = 16
"""Number of rows that a tile reads."""
TOKEN_GROUP = 8
"""Number of tokens that are adjacent in a decoder's key cache."""
ACTIVATIONS = ("none", "quick_gelu", "gelu", "gelu_tanh", "silu")

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Segments(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("queries", "keys", "values", "cos", "sin")),
        *((name, _POINTER) for name in ("cu_seqlens", "output")),
        *((name, _INT) for name in ("num_segments", "num_heads", "head_dim")),
        *((name, _INT) for name in ("row_stride", "angle_stride", "min_tile_rows")),
        ("scale", _FLOAT),
    )


class _CachedAttention(ctypes.Structure):
    _fields_ = (
        *((name, _POINTER) for name in ("queries", "keys", "values", "block_table", "output")),
        *((name, _INT) for name in ("num_rows", "seq_len", "head_dim", "min_tile_rows")),
        ("scale", _FLOAT),
    )


class _Product(ctypes.Structure):
    _fields_ = (
        ("x", _POINTER),
        ("weights", Matrix),
        *((name, _POINTER) for name in ("bias", "y")),
        *((name, _INT) for name in ("num_rows", "num_inputs", "num_outputs", "activation")),
        ("min_tile_rows", _INT),
    )


class TowerKernels:
    """Kernels and their thread pool, created by `find_kernels`.

    Calls from several threads run one after the other.
    """

    def __init__(self, loaded: ctypes.CDLL, num_threads: int) -> None:
        self._library = loaded
        self._num_threads = num_threads
        # The pool's threads sleep between calls, and end with the process.
        self._pool = loaded.pagemill_shared_team(num_threads)

    def __deepcopy__(self, memo: object) -> "TowerKernels":
        return self

    @property
    def has_tiles(self) -> bool:
        return bool(self._library.pagemill_has_tiles())

    @property
    def key(self) -> MachineKey:
        """Properties that affect the kernels' times."""
        kernels = Path(self._library._name).name
        return MachineKey(
            library.processor_name(), kernels, str(torch.__version__), self._num_threads
        )

    def attend(
        self,
        query: Tensor,  # [num_rows, num_heads, head_dim] with any stride between rows
        key: Tensor,
        value: Tensor,
        angles: tuple[Tensor, Tensor] | None,  # cos and sin, [num_rows, head_dim] with equal halves
        cu_seqlens: Tensor,  # [num_segments + 1]
        scale: float,
        min_tile_rows: int = NEVER,
    ) -> Tensor:  # [num_rows, num_heads, head_dim]
        """Attend within segments, after rotating queries and keys by their angles.

        Segments of at least `min_tile_rows` rows are computed by tiles, if the processor has them.
        """
        num_rows, num_heads, head_dim = query.shape
        assert head_dim % 2 == 0
        assert head_dim <= MAX_HEAD_DIM
        for tensor in (query, key, value):
            assert tensor.dtype == torch.bfloat16
            assert tensor.shape == query.shape
            assert tensor.stride() == (query.stride(0), head_dim, 1)
        starts = cu_seqlens.to(torch.int32).contiguous()
        lengths = starts.diff().tolist()
        assert starts[0] == 0
        assert sum(lengths) == num_rows
        assert min(lengths) >= 0
        output = torch.empty(num_rows, num_heads, head_dim, dtype=torch.bfloat16)
        cos, sin = (None, None) if angles is None else (a.float().contiguous() for a in angles)
        if cos is not None and sin is not None:
            assert cos.shape == sin.shape == (num_rows, head_dim)
        pointers = library.pointers(query, key, value, cos, sin, starts, output)
        sizes = (len(lengths), num_heads, head_dim, query.stride(0), head_dim)
        segments = _Segments(*pointers, *sizes, min_tile_rows, scale)
        self._library.pagemill_attend(self._pool, ctypes.byref(segments))
        return output

    def attend_cached(
        self,
        query: Tensor,  # [num_rows, head_dim], of the last tokens
        keys: Tensor,  # [num_blocks, head_dim / 2, 8 tokens, 2]
        values: Tensor,  # [num_blocks, 8 tokens / 2, head_dim rounded up to whole panels, 2]
        block_table: Tensor,  # [num_blocks of the sequence]
        seq_len: int,
        min_tile_rows: int = NEVER,
    ) -> Tensor:  # [num_rows, head_dim]
        """Attend as in a decoder's KV head with one query head, in the cache's layout."""
        num_rows, head_dim = query.shape
        for tensor in (query, keys, values):
            assert tensor.dtype == torch.bfloat16
            assert tensor.is_contiguous()
        assert num_rows <= seq_len <= TOKEN_GROUP * len(block_table)
        assert block_table.dtype == torch.int32
        output = torch.empty_like(query)
        pointers = library.pointers(query, keys, values, block_table, output)
        sizes = (num_rows, seq_len, head_dim, min_tile_rows)
        arguments = _CachedAttention(*pointers, *sizes, head_dim**-0.5)
        self._library.pagemill_attend_cached(self._pool, ctypes.byref(arguments))
        return output

    def multiply(
        self,
        x: Tensor,  # [..., num_inputs]
        weights: PackedMatrix,
        bias: Tensor,  # [num_outputs, rounded up to whole panels], float32
        num_outputs: int,
        activation: str = "none",
        min_tile_rows: int = NEVER,
    ) -> Tensor:  # [..., num_outputs]
        """Return `activation(x @ weight.T + bias)`, by tiles from `min_tile_rows` rows on.

        Tiles read 16 rows, so fewer rows use vectors unless `x` is part of a larger tensor.
        """
        num_inputs = weights.num_inputs
        assert x.dtype == torch.bfloat16
        assert x.shape[-1] == num_inputs
        assert bias.dtype == torch.float32
        assert len(bias) == len(weights.panels) * PANEL >= num_outputs
        x = x.contiguous()
        y = torch.empty(*x.shape[:-1], num_outputs, dtype=torch.bfloat16)
        sizes = (math.prod(x.shape[:-1]), num_inputs, num_outputs)
        if x.untyped_storage().nbytes() < 2 * (x.storage_offset() + TILE_ROWS * x.shape[-1]):
            min_tile_rows = NEVER
        source, *pointers = library.pointers(x, bias, y)
        activation_index = ACTIVATIONS.index(activation)
        product = _Product(
            source, weights.addresses, *pointers, *sizes, activation_index, min_tile_rows
        )
        self._library.pagemill_multiply(self._pool, ctypes.byref(product))
        return y


def pack_weight(weight: Tensor) -> Tensor:
    """Pack full weights [num_outputs, num_inputs]; return [num_panels, num_inputs / 2, 32, 2]."""
    pairs = pack_rows(weight.detach().contiguous().view(torch.int32))
    return pairs.view(torch.bfloat16).view(*pairs.shape, 2)


# One thread pool for all towers of the process.
_make_kernels = functools.cache(TowerKernels)


def find_kernels(weight: Tensor) -> TowerKernels | None:
    """Return the kernels for products of weights like this one; None if torch must run them."""
    loaded = library.load()
    if weight.device.type != "cpu" or weight.dtype != torch.bfloat16 or loaded is None:
        return None
    return _make_kernels(loaded, torch.get_num_threads())
