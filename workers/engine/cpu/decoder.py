"""Llama-like decoders on the C++ kernels; implements `DecoderModel`.

transformers loads the model and computes embeddings and rotary angles. The kernels compute the
layers and the head: their weights are packed, and torch's copies are freed layer by layer. A step
is one call, which releases the GIL.
"""

import ctypes
import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.models.language import LanguageAdapter
from shared.models.registry import find_decoder_traits
from shared.native import library, measuring, tower_kernels, trials
from shared.native.choices import NEVER, KernelSetting
from shared.native.matrices import PANEL
from shared.native.tower_kernels import MAX_HEAD_DIM, TOKEN_GROUP
from workers.engine.cpu.memory import allocate, on_collect
from workers.engine.cpu.weights import PackedWeights
from workers.engine.model.attention import KVCache
from workers.engine.model.flat_model import BatchLayout, DecoderModel, StepInputs
from workers.engine.model.rotary_table import RotaryTable

_PRODUCTS = ("qkv", "out", "gate_up", "down", "head")

_POINTER, _INT, _FLOAT = ctypes.c_void_p, ctypes.c_int32, ctypes.c_float


class _Config(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("hidden_size", "intermediate_size", "num_layers")),
        *((name, _INT) for name in ("vocab_size", "num_heads", "num_kv_heads", "head_dim")),
        ("norm_eps", _FLOAT),
        ("scale", _FLOAT),
        ("is_bf16", _INT),
        *((f"{name}_tile_rows", _INT) for name in _PRODUCTS),
        ("attention_tile_rows", _INT),
    )


class _Step(ctypes.Structure):
    _fields_ = (
        *((name, _INT) for name in ("num_tokens", "num_sequences", "block_size", "max_blocks")),
        *((name, _INT) for name in ("num_logits", "num_hidden", "num_deepstack")),
        *((name, _POINTER) for name in ("query_start_loc", "seq_lens", "block_tables")),
        *((name, _POINTER) for name in ("output_rows", "embeddings", "cos", "sin", "deepstack")),
        *((name, _POINTER) for name in ("keys", "values", "logits", "hidden")),
    )


@dataclass(frozen=True, slots=True)
class NativePlan:
    """Plan of a step: the batch as arrays."""

    query_start_loc: NDArray[np.int32]  # [num_sequences + 1]
    seq_lens: NDArray[np.int32]  # [num_sequences]
    block_tables: NDArray[np.int32]  # [num_sequences, max_num_blocks]
    block_size: int


def unsupported_reason(family: LanguageAdapter, block_size: int) -> str | None:
    """Return the reason for which the kernels cannot run a model; None if they can."""
    config: Any = family.decoder.config
    dtype = family.model.dtype
    if family.model.device.type != "cpu":
        return "it is not on a CPU"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"its weights are {dtype}"
    if "llama_like" not in find_decoder_traits(config):
        return f"there are no kernels for {config.model_type!r}"
    decoder: Any = family.decoder
    layer = decoder.layers[0]
    if reason := _unsupported_mlp(layer.mlp, config.hidden_act):
        return reason
    if config.hidden_size % 16 or config.intermediate_size % 16:
        return "its sizes are not multiples of 16"
    if layer.self_attn.head_dim % 8 or layer.self_attn.head_dim > MAX_HEAD_DIM:
        return f"its heads have {layer.self_attn.head_dim} dimensions"
    if 2 * len(decoder.rotary_emb.inv_freq) != layer.self_attn.head_dim:
        return "its rotary embedding rotates only a part of each head"
    if block_size % TOKEN_GROUP:
        return f"blocks of {block_size} tokens are not multiples of {TOKEN_GROUP}"
    if library.load() is None:
        return "there are no kernels on this machine"
    return None


def _unsupported_mlp(mlp: Any, activation: str) -> str | None:
    if activation != "silu" or mlp.gate_proj.bias is not None:
        return "its MLP is of another kind"
    return None


class NativeModel(DecoderModel):
    """A decoder whose layers and head run in C++."""

    kv_packing = "native"

    def __init__(
        self, family: LanguageAdapter, num_threads: int, kernels: KernelSetting = "measured"
    ) -> None:
        """Move the layers' weights out of the family's model; `unsupported_reason` must be None."""
        loaded = library.load()
        assert loaded is not None
        super().__init__(family)
        self._library = loaded
        decoder: Any = family.decoder
        model: Any = family.model
        self._rotary: Any = decoder.rotary_emb
        self._angles: RotaryTable | None = None
        if family.position_type == "int64":
            self._angles = RotaryTable(decoder.rotary_emb, family.num_position_rows)
        self._cache: KVCache | None = None
        self._addresses: tuple[Any, Any] = (None, None)
        """Pointer arrays of the cache's keys and values."""
        config = decoder.config
        attention = decoder.layers[0].self_attn
        self.weights = PackedWeights(family, loaded, num_threads)
        if model.get_output_embeddings().weight is not self._embed_tokens.weight:
            model.get_output_embeddings().weight = None
        self._config = _Config(
            config.hidden_size,
            config.intermediate_size,
            config.num_hidden_layers,
            self.vocab_size,
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.head_dim,
            config.rms_norm_eps,
            attention.scaling,
            self.dtype == torch.bfloat16,
            *[NEVER] * (len(_PRODUCTS) + 1),
        )
        self._choose_tile_rows(kernels)
        self._decoder = loaded.pagemill_decoder(
            ctypes.byref(self._config),
            self.weights.layers,
            self.weights.final_norm,
            ctypes.byref(self.weights.head),
            num_threads,
        )
        on_collect(self, loaded.pagemill_delete, self._decoder)

    # -- DecoderModel -----------------------------------------------------------------------------

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Return a cache in the layout of attention.h; the first dimension is the block."""
        assert block_size % TOKEN_GROUP == 0
        head_dim, unit = self._config.head_dim, 4 // self.dtype.itemsize
        groups, value_dim = block_size // TOKEN_GROUP, -(-head_dim // PANEL) * PANEL
        heads = (num_blocks, self._config.num_kv_heads)
        keys = (*heads, groups, head_dim // unit, TOKEN_GROUP, unit)
        values = (*heads, block_size // unit, value_dim, unit)
        return [(self._zeros(keys), self._zeros(values)) for _ in range(self._config.num_layers)]

    def plan(self, batch: BatchLayout, kv_cache: KVCache) -> NativePlan:
        block_size = kv_cache[0][0].shape[2] * TOKEN_GROUP
        tables = [
            table[: -(-seq_len // block_size)]
            for table, seq_len in zip(batch.block_tables, batch.seq_lens, strict=True)
        ]
        lengths = np.fromiter(map(len, tables), dtype=np.int64, count=len(tables))
        padded = np.zeros((len(tables), int(lengths.max())), dtype=np.int32)
        filled = np.arange(padded.shape[1]) < lengths[:, None]
        padded[filled] = np.fromiter(itertools.chain.from_iterable(tables), dtype=np.int32)
        return NativePlan(
            np.array(batch.query_start_loc, dtype=np.int32),
            np.array(batch.seq_lens, dtype=np.int32),
            padded,
            block_size,
        )

    def forward(self, step: StepInputs) -> Tensor:  # logits in float32
        positions, plan = step.positions, step.plan
        if self._angles is not None:
            cos, sin = self._angles.angles(positions)
        else:
            like = torch.empty(0, dtype=torch.float32)
            cos, sin = self._rotary(like, positions if len(positions) == 1 else positions[:, None])
            cos, sin = cos.contiguous(), sin.contiguous()
        embeddings = step.embeddings.contiguous()
        rows, num_logits = step.sampled_rows, len(step.sampled_rows)
        if step.hidden_rows is not None:
            rows = torch.cat([rows, step.hidden_rows])
        rows = rows.to(torch.int32)
        logits = torch.empty(num_logits, self.vocab_size, dtype=torch.float32)
        deepstack = None if step.deepstack is None else step.deepstack.contiguous()
        arguments = _Step(
            len(embeddings),
            len(plan.seq_lens),
            plan.block_size,
            plan.block_tables.shape[1],
            num_logits,
            len(rows) - num_logits,
            0 if deepstack is None else len(deepstack),
            *(a.ctypes.data for a in (plan.query_start_loc, plan.seq_lens, plan.block_tables)),
            *library.pointers(rows, embeddings, cos, sin, deepstack),
            *self._addresses_of(step.kv_cache),
            logits.data_ptr(),
            *library.pointers(step.hidden),
        )
        self._library.pagemill_forward(self._decoder, ctypes.byref(arguments))
        return logits

    def _addresses_of(self, kv_cache: KVCache) -> tuple[Any, Any]:
        """Return pointers to the keys and values of all layers; they are cached per KV cache."""
        if self._cache is not kv_cache:
            keys, values = zip(*kv_cache, strict=True)
            self._cache, self._addresses = kv_cache, (_pointer_array(keys), _pointer_array(values))
        return self._addresses

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        memory = allocate(self._library, math.prod(shape) * self.dtype.itemsize)
        return torch.frombuffer(memory, dtype=self.dtype).view(shape)

    # -- kernels ----------------------------------------------------------------------------------

    def _choose_tile_rows(self, setting: KernelSetting) -> None:
        """Set the number of rows from which each operation uses tiles, in the config."""
        config = self._config
        kernels = tower_kernels.find_kernels(self._embed_tokens.weight)
        if kernels is None or not kernels.has_tiles:
            return
        query = config.head_dim * config.num_heads
        sizes = {
            "qkv": (config.hidden_size, query + 2 * config.head_dim * config.num_kv_heads),
            "out": (query, config.hidden_size),
            "gate_up": (config.hidden_size, 2 * config.intermediate_size),
            "down": (config.intermediate_size, config.hidden_size),
            "head": (config.hidden_size, config.vocab_size),
        }
        operations = {
            name: trials.decoder_product(kernels, *size, *self.weights.forms[name])
            for name, size in sizes.items()
        }
        operations["attention"] = trials.decoder_attention(kernels, config.head_dim)
        options = measuring.select(list(operations.values()), setting, kernels.key)
        for name, trial in operations.items():
            option = options[trial.operation.name]
            setattr(config, f"{name}_tile_rows", option.min_tile_rows)


def _pointer_array(tensors: Sequence[Tensor]) -> Any:
    array = (_POINTER * len(tensors))(*library.pointers(*tensors))
    return ctypes.cast(array, _POINTER)
