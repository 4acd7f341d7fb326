"""Plan of the memory of this machine: sizes of the KV cache and of the context of models."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from rich.filesize import decimal

from shared.errors import ConfigError

# For the other roles, the modules of torch, and the activations of a step.
RESERVE_BYTES = 1536 * 2**20
# Kernels round up the sizes of heads and blocks.
KV_MARGIN = 1.25
MIN_MODEL_LEN = 512
# Number of sequences of maximum length that a cache holds, if there is memory for them.
NUM_LONG_SEQUENCES = 16
STEP_TOKENS = 256
# A step has the states before it and after it.
STATE_COPIES = 2
MIN_KV_CACHE_MIB = 64
ITEM_BYTES = {"float64": 8, "float32": 4, "bfloat16": 2, "float16": 2}
# torch's products with int8 weights are fast in this type only.
INT8_DTYPE = "bfloat16"

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


class Weights(NamedTuple):
    """Weights that processes have in memory."""

    num_values: int = 0
    """Number of parameters in the served dtype."""
    num_rounded: int = 0
    """Number of parameters that `quantization: int8` rounds; each takes a byte."""
    number_bytes: int = 0
    """Size of the weights that keep the numbers of the folder, with their scales."""
    codec_bytes: int = 0
    """Size of the codec of a model that speaks, in another folder and in its saved type."""

    def num_bytes(self, dtype: str) -> int:
        values = self.num_values * ITEM_BYTES[dtype]
        return values + self.num_rounded + self.number_bytes + self.codec_bytes


@dataclass(frozen=True, slots=True)
class ModelNeeds:
    """Size of a model. The plan chooses the dtype if it is None."""

    name: str
    weights: Weights
    """Weights of all processes of the model."""
    kv_values_per_token: int
    """Keys and values of a token in the engine that has the most of them."""
    longest: int
    saved_dtype: str | None = None
    dtype: str | None = None
    max_model_len: int | None = None
    state_bytes: int = 0
    """States of one sequence, if the model has recurrent layers."""
    num_engines: int = 1
    """Number of processes with a KV cache."""

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of the KV cache for one token."""
        return int(self.kv_values_per_token * ITEM_BYTES[dtype] * KV_MARGIN)

    def states_bytes(self, max_num_seqs: int) -> int:
        return STATE_COPIES * max_num_seqs * self.state_bytes


@dataclass(frozen=True, slots=True)
class PainterNeeds:
    """Weights of a model that paints."""

    name: str
    dtype: str
    parts: Mapping[str, int]
    """Bytes of each part, by its name."""

    @property
    def weights_bytes(self) -> int:
        return sum(self.parts.values())

    def line(self, available: int) -> str:
        parts = ", ".join(
            f"{part.replace('_', ' ')} {decimal(size)}" for part, size in self.parts.items()
        )
        return f"{self.name}: {parts} as {self.dtype}, of {decimal(available)} of free memory"


@dataclass(frozen=True, slots=True)
class Share:
    """Memory and context of one model."""

    name: str
    dtype: str
    max_model_len: int
    weights: Weights
    num_engines: int = 1
    states_bytes: int = 0

    @property
    def form(self) -> str:
        """Types of the weights, for users."""
        forms = [(self.weights.number_bytes, "stored numbers"), (self.weights.num_rounded, "int8")]
        return " and ".join([*(form for size, form in forms if size), self.dtype])


@dataclass(frozen=True, slots=True)
class Plan:
    shares: list[Share]
    kv_cache_mib: int
    max_num_seqs: int
    available: int

    def lines(self) -> list[str]:
        return [
            f"{share.name}: weights {decimal(share.weights.num_bytes(share.dtype))} as"
            f" {share.form}, max_model_len {share.max_model_len}, KV cache"
            f" {f'{share.num_engines} times ' if share.num_engines > 1 else ''}"
            f"{self.kv_cache_mib} MiB,"
            f"{self._states_of(share)} of {decimal(self.available)} of free memory"
            for share in self.shares
        ]

    def _states_of(self, share: Share) -> str:
        if not share.states_bytes:
            return ""
        return f" states of {self.max_num_seqs} sequences {decimal(share.states_bytes)},"


def make_plan(
    models: Sequence[ModelNeeds],
    available: int,
    kv_cache_mib: int | None = None,
    max_num_seqs: int = 64,
) -> Plan:
    """Divide the memory among models. Raises ConfigError if the weights do not fit.

    A model that was saved in bfloat16 keeps this dtype. Other models are served in float32, which
    is exact, or in bfloat16 if float32 does not fit. With int8, all are served in bfloat16. States
    take at most half of a model's share, so that there may be fewer sequences than `max_num_seqs`.
    """
    dtypes = [model.dtype or _exact_dtype(model) for model in models]
    if _rest(models, dtypes, available) <= 0:
        dtypes = [model.dtype or "bfloat16" for model in models]
    rest = _rest(models, dtypes, available)
    if rest <= 0:
        raise ConfigError(
            f"{', '.join(model.name for model in models)}: the weights need"
            f" {_count_bytes(models, dtypes)} bytes as {', '.join(dict.fromkeys(dtypes))}, all"
            f" else {RESERVE_BYTES}, and {available} bytes"
            " of memory are available",
            field="models",
        )
    # The other half is for caches of images, for prompts in flight, and for growing processes.
    memory = rest // 2 // sum(model.num_engines for model in models)
    num_seqs = min(_choose_num_seqs(model, memory // 2, max_num_seqs) for model in models)
    states = max(model.states_bytes(num_seqs) for model in models)
    budget = kv_cache_mib * 2**20 if kv_cache_mib else memory - states
    lengths = [
        _choose_len(model, model.kv_bytes(dtype), budget)
        for model, dtype in zip(models, dtypes, strict=True)
    ]
    useful = max(
        NUM_LONG_SEQUENCES * length * model.kv_bytes(dtype)
        for model, dtype, length in zip(models, dtypes, lengths, strict=True)
    )
    mib = kv_cache_mib or max(MIN_KV_CACHE_MIB, -(-min(budget, useful) // 2**20))
    shares = [
        Share(
            model.name,
            dtype,
            length,
            model.weights,
            model.num_engines,
            model.states_bytes(num_seqs),
        )
        for model, dtype, length in zip(models, dtypes, lengths, strict=True)
    ]
    return Plan(shares, mib, num_seqs, available)


def check_painters(painters: Sequence[PainterNeeds], available: int) -> None:
    """Raise ConfigError if the weights of models that paint do not fit."""
    weights = sum(painter.weights_bytes for painter in painters)
    if painters and weights + RESERVE_BYTES > available:
        raise ConfigError(
            f"{', '.join(painter.name for painter in painters)}: the weights need {weights} bytes,"
            f" all else {RESERVE_BYTES}, and {available} bytes of memory are available",
            field="models",
        )


def _exact_dtype(model: ModelNeeds) -> str:
    if model.weights.num_rounded:
        return INT8_DTYPE
    return "bfloat16" if model.saved_dtype == "bfloat16" else "float32"


def _rest(models: Sequence[ModelNeeds], dtypes: Sequence[str], available: int) -> int:
    return available - RESERVE_BYTES - _count_bytes(models, dtypes)


def _count_bytes(models: Sequence[ModelNeeds], dtypes: Sequence[str]) -> int:
    pairs = zip(models, dtypes, strict=True)
    return sum(model.weights.num_bytes(dtype) for model, dtype in pairs)


def _choose_num_seqs(model: ModelNeeds, budget: int, max_num_seqs: int) -> int:
    """Return the number of sequences whose states fit. Raises ConfigError if none does."""
    if model.states_bytes(1) > budget:
        raise ConfigError(
            f"{model.name}: the states of one sequence need {model.states_bytes(1)} bytes, and"
            f" {budget} are available",
            field="models",
        )
    return min(max_num_seqs, budget // max(1, model.states_bytes(1)))


def _choose_len(model: ModelNeeds, kv_bytes: int, budget: int) -> int:
    """Return the longest context that fits. Raises ConfigError if none does."""
    num_tokens = budget // max(1, kv_bytes)
    if model.max_model_len is not None:
        if model.max_model_len > num_tokens:
            raise ConfigError(
                f"{model.name}: {model.max_model_len} tokens need"
                f" {model.max_model_len * kv_bytes} bytes of KV cache, and {budget} are available:"
                " lower --max-model-len",
                field="max_model_len",
            )
        return model.max_model_len
    length = min(model.longest, num_tokens)
    if length < min(MIN_MODEL_LEN, model.longest):
        raise ConfigError(
            f"{model.name}: {budget} bytes are available for the KV cache, and {MIN_MODEL_LEN}"
            f" tokens need {MIN_MODEL_LEN * kv_bytes}",
            field="models",
        )
    return length if length == model.longest else length - length % STEP_TOKENS


def available_bytes(meminfo: Path = MEMINFO, cgroup: Path = CGROUP) -> int:
    """Return the memory available to new processes, within the limit of a container."""
    fields = dict(line.split(":", 1) for line in meminfo.read_text().splitlines() if ":" in line)
    available = int(fields["MemAvailable"].split()[0]) * 1024
    try:
        limit = int((cgroup / "memory.max").read_text())
        used = int((cgroup / "memory.current").read_text())
        pairs = (line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
        # The kernel frees cached files, such as recent downloads, when memory is needed.
        cached = sum(int(n) for name, n in pairs if name in ("active_file", "inactive_file"))
        return min(available, limit - used + cached)
    except (OSError, ValueError):
        return available  # There is no limit, or no control group.
