"""Formats of quantized checkpoints: which tensors hold a weight, and how its numbers are stored.

Each reader knows one format. It gets the settings in config.json and the headers of the tensors,
and describes each weight as numbers with a scale for each block of them. The module
`shared.vision.dequantize` computes the values.
"""

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import msgspec
from msgspec import Struct

from shared.vision.weight_files import TensorHeader

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of tensors that are not quantized."""
FP8 = "F8_E4M3"
EXPONENTS = frozenset({"F8_E8M0", "U8"})
"""Types of scales that are powers of two; a byte holds the exponent, plus 127."""
INTEGERS = frozenset({"I32", "I64"})
KEPT_NUMBERS = frozenset({("I8", 0), (FP8, 0), ("I32", 4)})
"""Types of tensors whose numbers can be kept, each with the bits of packed numbers."""
MIN_GROUP = 32
"""Groups of kept numbers have a multiple of this size."""

# Scales and zeros of activations and of the KV cache, which both keep the served type.
_ACTIVATION = re.compile(
    r"(^|[._])(input|output|activation|kv|[qkv])_(scale(_inv|_ub)?|zero_point)$"
)
# Order in which AWQ stores eight columns in an integer.
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
MXFP4_BLOCK = 32


class Contradiction(Exception):
    """A tensor or a setting does not fit the format that the settings name."""


class Packing(Struct, frozen=True):
    """Places of the numbers in the integers of a tensor."""

    bits: int
    """Size of a number."""
    shifts: tuple[int, ...]
    """First bit of each number of an integer."""
    axis: Literal[0, 1]
    """Dimension along which the numbers of an integer follow each other."""


class QuantizedWeight(Struct, frozen=True):
    """A weight that is stored as numbers: each value is `(number - zero) * scale`.

    The numbers form a matrix, or a stack of matrices.
    """

    name: str
    """Name of the weight in the model."""
    shape: list[int]
    """Shape of the weight in the model."""
    numbers: str
    """Name of the tensor with the numbers, as are `scales`, `zeros`, `groups` and `true_shape`."""
    scales: str
    block: tuple[int, int]
    """Rows and columns of the matrix that share a scale."""
    packing: Packing | None = None
    """Packing of the numbers; None for one number an element."""
    is_e2m1: bool = False
    """Whether the numbers are the 4-bit floats of MXFP4."""
    zeros: str | None = None
    zero_packing: Packing | None = None
    zero: int = 0
    """The zero of all blocks, or the number that is added to each of `zeros`."""
    groups: str | None = None
    """Tensor with the group of each input, in place of consecutive blocks of inputs."""
    is_ordered: bool = False
    """Whether the settings state that the groups are consecutive."""
    is_transposed: bool = False
    """Whether the matrix has a row for each input, and the weight a column."""
    true_shape: str | None = None
    """Tensor that repeats the shape of the weight."""

    @property
    def bits(self) -> int:
        """Size of a packed number; 0 for one number an element."""
        return 0 if self.packing is None else self.packing.bits

    @property
    def group_size(self) -> int:
        """Number of inputs that share a scale."""
        return min(self.block[0 if self.is_transposed else 1], self.shape[-1])

    def can_keep(self, dtype: str) -> bool:
        """Return whether products can read the numbers, in a tensor of this type, as they are."""
        if (dtype, self.bits) not in KEPT_NUMBERS or len(self.shape) != 2 or self.is_e2m1:
            return False
        num_inputs, size = self.shape[1], self.group_size
        if num_inputs % 2 or (size < num_inputs and size % MIN_GROUP):
            return False
        has_steps = self.zeros is not None and self.bits == 0
        return not has_steps and (self.groups is None or self.is_ordered)

    @property
    def kept_bytes(self) -> int:
        """Size of the numbers in memory, with their scales and zeros, if they are kept."""
        num_outputs, num_inputs = self.shape
        grids = 1 if self.zeros is None else 2
        num_scales = grids * num_outputs * _divide_up(num_inputs, self.group_size)
        return num_outputs * num_inputs * (self.bits or 8) // 8 + 4 * num_scales


class Excluded:
    """The modules that the settings exclude: names, parts of names, and regular expressions."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self._parts = {p for p in patterns if "*" not in p and not p.startswith("re:")}
        self._expressions = [_compile(p) for p in patterns if p not in self._parts]

    def __contains__(self, module: str) -> bool:
        parts = module.split(".")
        spans = itertools.combinations(range(len(parts) + 1), 2)
        return any(".".join(parts[first:end]) in self._parts for first, end in spans) or any(
            expression.fullmatch(module) for expression in self._expressions
        )


def _compile(pattern: str) -> re.Pattern[str]:
    try:
        if pattern.startswith("re:"):
            return re.compile(rf"(?:{pattern[3:]}).*")
        parts = re.escape(pattern).replace(r"\*", ".*")
        return re.compile(rf"(.*\.)?{parts}(\..*)?")
    except re.error as error:
        raise Contradiction(f"the module {pattern!r} in the settings is no pattern") from error


class Tensors:
    """The tensors of a folder, and the names of those that a format claims."""

    def __init__(self, headers: Mapping[str, TensorHeader], excluded: Sequence[str]) -> None:
        self.headers = headers
        self.claimed = {name for name in headers if _ACTIVATION.search(name)}
        self._excluded = Excluded(excluded)

    def find(self, dtype: str, ending: str) -> Iterator[tuple[str, list[int]]]:
        """Yield the names and shapes of the tensors with numbers, and claim them."""
        for name, header in self.headers.items():
            if name in self.claimed or header.dtype != dtype or not name.endswith(ending):
                continue
            if name.rpartition(".")[0] in self._excluded:
                raise Contradiction(f"{name} is quantized, but the settings exclude its module")
            self.claimed.add(name)
            yield name, header.shape

    def take(self, name: str, owner: str, dtypes: frozenset[str], *shapes: list[int]) -> str:
        """Claim a tensor that belongs to the numbers `owner`, and return its name."""
        header = self.headers.get(name)
        if header is None:
            raise Contradiction(f"{owner} has no {name.rpartition('.')[2]}")
        if header.dtype not in dtypes:
            raise Contradiction(
                f"{name} has the type {header.dtype}, not {' or '.join(sorted(dtypes))}"
            )
        if header.shape not in shapes:
            raise Contradiction(
                f"{name} has the shape {header.shape}, but {owner} and the settings require"
                f" {' or '.join(map(str, shapes))}"
            )
        self.claimed.add(name)
        return name


def _divide_up(size: int, by: int) -> int:
    return -(-size // by)


def _consecutive(bits: int, axis: Literal[0, 1], word_bits: int = 32) -> Packing:
    return Packing(bits, tuple(range(0, word_bits, bits)), axis)


# -- scales ----------------------------------------------------------------------------------------


class Blocks(Struct, frozen=True):
    """The rows and columns of a matrix that share a scale; None stands for all of them."""

    rows: int | None = None
    columns: int | None = None

    def __post_init__(self) -> None:
        if any(size is not None and size < 1 for size in (self.rows, self.columns)):
            raise Contradiction(f"the settings have a block of {self.rows} x {self.columns}")

    def describe(self) -> str:
        match self:
            case Blocks(None, None):
                return "one scale per tensor"
            case Blocks(1, None):
                return "one scale per channel"
            case Blocks(1, columns):
                return f"groups of {columns}"
        return f"blocks of {self.rows} x {self.columns}"

    def resolve(self, rows: int, columns: int) -> tuple[int, int]:
        return self.rows or rows, self.columns or columns

    def shapes(self, rows: int, columns: int, stack: Sequence[int]) -> list[list[int]]:
        """Return the shapes that scales may have for a matrix, or a stack of matrices."""
        high, wide = self.resolve(rows, columns)
        shape = [*stack, _divide_up(rows, high), _divide_up(columns, wide)]
        # One column, or a single scale, is also stored with fewer dimensions.
        shapes = [shape]
        if self.columns is None:
            shapes.append(shape[:-1])
        if self.rows is None and self.columns is None:
            shapes.append(shape[:-2])
        return shapes


def _read_scaled(
    tensors: Tensors, name: str, shape: list[int], blocks: Blocks, endings: Sequence[str]
) -> QuantizedWeight:
    """Return the weight of a tensor with one number an element and its scales."""
    if len(shape) < 2:
        raise Contradiction(f"{name} has the shape {shape}, not the shape of matrices")
    *stack, rows, columns = shape
    ending = next((e for e in endings if name + e in tensors.headers), endings[0])
    shapes = blocks.shapes(rows, columns, stack)
    scales = tensors.take(name + ending, name, FLOATS | {"F8_E8M0"}, *shapes)
    zeros = f"{name}_zero_point"
    if zeros in tensors.headers:
        dtype = tensors.headers[name].dtype
        tensors.take(zeros, name, frozenset({dtype}), *shapes)
    return QuantizedWeight(
        name,
        shape,
        name,
        scales,
        blocks.resolve(rows, columns),
        zeros=zeros if zeros in tensors.headers else None,
    )


# -- readers ---------------------------------------------------------------------------------------


class _Fp8(Struct, frozen=True):
    """FP8 as transformers, DeepSeek and Qwen write it: `weight` and `weight_scale_inv`."""

    weight_block_size: tuple[int, int] | None = None
    fmt: Literal["e4m3"] = "e4m3"
    modules_to_not_convert: list[str] | None = None
    ignored_layers: list[str] | None = None

    @property
    def excluded(self) -> list[str]:
        return [*(self.modules_to_not_convert or ()), *(self.ignored_layers or ())]

    @property
    def blocks(self) -> Blocks:
        return Blocks(*(self.weight_block_size or (None, None)))

    @property
    def label(self) -> str:
        return f"FP8, {self.blocks.describe()}"

    def read(self, tensors: Tensors) -> Iterator[QuantizedWeight]:
        for name, shape in tensors.find(FP8, ""):
            yield _read_scaled(tensors, name, shape, self.blocks, ("_scale_inv", "_scale"))


class _FbgemmFp8(_Fp8, frozen=True):
    """FP8 of FBGEMM: `weight` and `weight_scale` with one scale per output channel."""

    @property
    def blocks(self) -> Blocks:
        return Blocks(1)


class _ModelOpt(_Fp8, frozen=True, kw_only=True):
    """FP8 of ModelOpt: `weight` and `weight_scale`."""

    quant_algo: Literal["FP8", "FP8_PER_CHANNEL_PER_TOKEN"]
    ignore: list[str] | None = None
    exclude_modules: list[str] | None = None

    @property
    def excluded(self) -> list[str]:
        return [*(self.ignore or ()), *(self.exclude_modules or ())]

    @property
    def blocks(self) -> Blocks:
        return Blocks() if self.quant_algo == "FP8" else Blocks(1)


class _CompressedWeights(Struct, frozen=True):
    num_bits: int
    type: Literal["int", "float"] = "int"
    strategy: Literal["tensor", "channel", "group", "block"] | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | None = None
    symmetric: bool = True

    @property
    def blocks(self) -> Blocks:
        size = self.group_size
        by_size = "tensor" if size is None else "channel" if size == -1 else "group"
        match self.strategy or by_size:
            case "tensor":
                return Blocks()
            case "channel":
                return Blocks(1)
            case "group" if size is not None:
                return Blocks(1, size)
            case "block" if self.block_structure is not None:
                return Blocks(*self.block_structure)
        raise Contradiction(f"the strategy {self.strategy!r} has no size in the settings")


class _Stored(NamedTuple):
    """Tensor with the numbers of a weight."""

    label: str
    dtype: str
    ending: str


# By the format, and the type and the number of bits of a number.
_STORED = {
    ("float-quantized", "float", 8): _Stored("FP8", FP8, ".weight"),
    ("naive-quantized", "float", 8): _Stored("FP8", FP8, ".weight"),
    ("int-quantized", "int", 8): _Stored("int8", "I8", ".weight"),
    ("naive-quantized", "int", 8): _Stored("int8", "I8", ".weight"),
    ("pack-quantized", "int", 8): _Stored("int8", "I32", ".weight_packed"),
    ("pack-quantized", "int", 4): _Stored("int4", "I32", ".weight_packed"),
    ("mxfp4-pack-quantized", "float", 4): _Stored("MXFP4", "U8", ".weight_packed"),
}


class _CompressedGroup(Struct, frozen=True):
    targets: list[str]
    weights: _CompressedWeights | None = None
    format: str | None = None


class _Scheme(NamedTuple):
    """Settings for the modules that a group targets."""

    targets: list[str]
    weights: _CompressedWeights
    stored: _Stored


class _Compressed(Struct, frozen=True):
    """compressed-tensors: 8-bit numbers in `weight`, or packed numbers in `weight_packed`."""

    config_groups: dict[str, _CompressedGroup]
    format: str = "dense"
    ignore: list[str] = []
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if (self.sparsity_config or {}).get("format", "dense") != "dense":
            raise Contradiction("the setting sparsity_config is not supported")
        if (self.transform_config or {}).get("config_groups"):
            raise Contradiction("the setting transform_config is not supported")

    @property
    def excluded(self) -> list[str]:
        return self.ignore

    @property
    def label(self) -> str:
        parts = dict.fromkeys(
            f"{stored.label}, {weights.blocks.describe()}" for _, weights, stored in self._schemes()
        )
        return f"{' and '.join(parts)} (compressed-tensors)"

    def read(self, tensors: Tensors) -> Iterator[QuantizedWeight]:
        schemes = self._schemes()
        for dtype, ending in dict.fromkeys((s.dtype, s.ending) for s in _STORED.values()):
            for name, shape in tensors.find(dtype, ending):
                _, weights, stored = self._scheme_of(schemes, name)
                if (stored.dtype, stored.ending) != (dtype, ending):
                    raise Contradiction(
                        f"{name} has the type {dtype}, but the settings require {stored.label} in"
                        f" {stored.ending[1:]} with the type {stored.dtype}"
                    )
                if ending == ".weight":
                    yield _read_scaled(tensors, name, shape, weights.blocks, ("_scale",))
                else:
                    yield self._read_packed(tensors, name, shape, weights)

    def _read_packed(
        self, tensors: Tensors, name: str, shape: list[int], weights: _CompressedWeights
    ) -> QuantizedWeight:
        is_e2m1, owner = weights.type == "float", name.removesuffix("_packed")
        packing = _consecutive(weights.num_bits, 1, 8 if is_e2m1 else 32)
        rows, words = _matrix(name, shape)
        columns, per_word = words * len(packing.shifts), len(packing.shifts)
        blocks = weights.blocks
        shapes = blocks.shapes(rows, columns, ())
        scale_types = EXPONENTS if is_e2m1 else FLOATS
        scales = tensors.take(f"{owner}_scale", name, scale_types, *shapes)
        num_rows, num_columns = shapes[0]
        optional = {
            "zeros": ("_zero_point", [_divide_up(num_rows, per_word), num_columns]),
            "groups": ("_g_idx", [columns]),
            "true_shape": ("_shape", [2]),
        }
        parts: dict[str, str | None] = dict.fromkeys(optional)
        for part, (ending, part_shape) in optional.items():
            is_needed = part == "zeros" and not weights.symmetric
            if is_needed or f"{owner}{ending}" in tensors.headers:
                parts[part] = tensors.take(f"{owner}{ending}", name, INTEGERS, part_shape)
        return QuantizedWeight(
            owner,
            [rows, columns],
            name,
            scales,
            blocks.resolve(rows, columns),
            packing,
            is_e2m1,
            # Zeros of symmetric weights are the middle of the numbers. Some tools store them.
            None if weights.symmetric else parts["zeros"],
            zero_packing=_consecutive(weights.num_bits, 0),
            zero=1 << (weights.num_bits - 1) if weights.symmetric and not is_e2m1 else 0,
            groups=parts["groups"],
            true_shape=parts["true_shape"],
        )

    def _schemes(self) -> list[_Scheme]:
        return [
            _Scheme(group.targets, group.weights, self._stored(group, group.weights))
            for group in self.config_groups.values()
            if group.weights is not None
        ]

    def _stored(self, group: _CompressedGroup, weights: _CompressedWeights) -> _Stored:
        name = group.format or self.format
        stored = _STORED.get((name, weights.type, weights.num_bits))
        if stored is None:
            raise Contradiction(
                f"the format {name!r} with the type {weights.type!r} and {weights.num_bits} bits is"
                " not supported"
            )
        return stored

    def _scheme_of(self, schemes: Sequence[_Scheme], name: str) -> _Scheme:
        """Return the scheme for a tensor: by the name of its module, else by its class."""
        module = name.rpartition(".")[0]
        by_class = []
        for scheme in schemes:
            for target in scheme.targets:
                is_pattern = target.startswith("re:")
                if target == module or (is_pattern and _compile(target).fullmatch(module)):
                    return scheme
            if any(not target.startswith("re:") for target in scheme.targets):
                by_class.append(scheme)
        if len(by_class) != 1:
            raise Contradiction(f"{name} belongs to {len(by_class)} groups of the settings, not 1")
        return by_class[0]


class _Awq(Struct, frozen=True):
    """AWQ: `qweight`, `qzeros` and `scales`, with a row for each input."""

    bits: Literal[4]
    group_size: int
    version: str = "gemm"
    format: str = "gemm"
    modules_to_not_convert: list[str] | None = None

    def __post_init__(self) -> None:
        for version in (self.version, self.format):
            if version.lower() != "gemm":
                raise Contradiction(f"the version {version!r} is not supported, only 'gemm' is")

    @property
    def excluded(self) -> list[str]:
        return self.modules_to_not_convert or []

    @property
    def label(self) -> str:
        return f"int4, {_describe_inputs(self.group_size)} (AWQ)"

    def read(self, tensors: Tensors) -> Iterator[QuantizedWeight]:
        shifts = tuple(self.bits * _AWQ_ORDER.index(column) for column in range(8))
        packing = Packing(self.bits, shifts, 1)
        for name, shape in tensors.find("I32", ".qweight"):
            num_inputs, words = _matrix(name, shape)
            yield _read_by_inputs(
                tensors, name, [num_inputs, words * 8], self.group_size, packing, packing, 0
            )


class _Gptq(Struct, frozen=True):
    """GPTQ: `qweight`, `qzeros`, `scales` and `g_idx`, with a row for each input."""

    bits: Literal[2, 4, 8]
    group_size: int
    desc_act: bool = False
    checkpoint_format: Literal["gptq", "gptq_v2"] = "gptq"
    format: Literal["gptq", "gptq_v2"] | None = None
    pack_dtype: Literal["int32"] = "int32"
    dynamic: dict[str, Any] | None = None
    modules_to_not_convert: list[str] | None = None

    def __post_init__(self) -> None:
        for pattern in self.dynamic or {}:
            if not pattern.startswith("-:"):
                raise Contradiction(f"the setting dynamic has {pattern!r}, which is not supported")

    @property
    def excluded(self) -> list[str]:
        skipped = [f"re:{pattern[2:]}" for pattern in self.dynamic or {}]
        return [*(self.modules_to_not_convert or ()), *skipped]

    @property
    def label(self) -> str:
        return f"int{self.bits}, {_describe_inputs(self.group_size)} (GPTQ)"

    def read(self, tensors: Tensors) -> Iterator[QuantizedWeight]:
        rows, columns = _consecutive(self.bits, 0), _consecutive(self.bits, 1)
        # The first version stores each zero reduced by one.
        added = 0 if "gptq_v2" in (self.checkpoint_format, self.format) else 1
        for name, shape in tensors.find("I32", ".qweight"):
            words, num_outputs = _matrix(name, shape)
            num_inputs = words * len(rows.shifts)
            weight = _read_by_inputs(
                tensors, name, [num_inputs, num_outputs], self.group_size, rows, columns, added
            )
            groups = f"{name.removesuffix('qweight')}g_idx"
            if groups in tensors.headers:
                tensors.take(groups, name, INTEGERS, [num_inputs])
                weight = msgspec.structs.replace(
                    weight, groups=groups, is_ordered=not self.desc_act
                )
            elif self.desc_act:
                raise Contradiction(f"{name} has no g_idx, which desc_act requires")
            yield weight


def _describe_inputs(group_size: int) -> str:
    return Blocks(1, None if group_size == -1 else group_size).describe()


def _matrix(name: str, shape: list[int]) -> tuple[int, int]:
    if len(shape) != 2:
        raise Contradiction(f"{name} has the shape {shape}, not the shape of a matrix")
    rows, columns = shape
    return rows, columns


def _read_by_inputs(
    tensors: Tensors,
    name: str,
    shape: list[int],
    group_size: int,
    packing: Packing,
    zero_packing: Packing,
    added: int,
) -> QuantizedWeight:
    """Return the weight of AWQ's or GPTQ's `qweight`, a matrix of `shape` with packed numbers."""
    module = name.removesuffix("qweight")
    num_inputs, num_outputs = shape
    size = num_inputs if group_size == -1 else group_size
    num_groups = _divide_up(num_inputs, size)
    words = _divide_up(num_outputs, len(zero_packing.shifts))
    return QuantizedWeight(
        f"{module}weight",
        [num_outputs, num_inputs],
        name,
        tensors.take(f"{module}scales", name, FLOATS, [num_groups, num_outputs]),
        (size, 1),
        packing,
        zeros=tensors.take(f"{module}qzeros", name, INTEGERS, [num_groups, words]),
        zero_packing=zero_packing,
        zero=added,
        is_transposed=True,
    )


class _Mxfp4(Struct, frozen=True):
    """MXFP4 of gpt-oss: experts in `*_blocks` and `*_scales`, 32 inputs in a block of 16 bytes."""

    modules_to_not_convert: list[str] | None = None

    @property
    def label(self) -> str:
        return f"MXFP4, groups of {MXFP4_BLOCK}"

    @property
    def excluded(self) -> list[str]:
        return self.modules_to_not_convert or []

    def read(self, tensors: Tensors) -> Iterator[QuantizedWeight]:
        for name, shape in tensors.find("U8", "_blocks"):
            owner = name.removesuffix("_blocks")
            if len(shape) != 4 or shape[-1] * 2 != MXFP4_BLOCK:
                raise Contradiction(
                    f"{name} has the shape {shape}, not [experts, rows, groups, 16]"
                )
            num_experts, num_outputs, num_groups, _ = shape
            yield QuantizedWeight(
                owner,
                [num_experts, num_groups * MXFP4_BLOCK, num_outputs],
                name,
                tensors.take(f"{owner}_scales", name, EXPONENTS, shape[:-1]),
                (1, MXFP4_BLOCK),
                _consecutive(4, 1, 8),
                is_e2m1=True,
                is_transposed=True,
            )


class Reader(Protocol):
    """Settings of one format, which describe the weights among the tensors of a folder."""

    @property
    def label(self) -> str:
        """Name of the format, for users."""

    @property
    def excluded(self) -> list[str]:
        """Modules that the settings exclude."""

    def read(self, tensors: Tensors) -> Iterator[QuantizedWeight]:
        """Yield the quantized weights, and claim their tensors. Raises Contradiction."""


READERS: dict[str, type[Reader]] = {
    "awq": _Awq,
    "compressed-tensors": _Compressed,
    "fbgemm_fp8": _FbgemmFp8,
    "fp8": _Fp8,
    "gptq": _Gptq,
    "modelopt": _ModelOpt,
    "mxfp4": _Mxfp4,
}
"""Readers by the `quant_method` of the settings."""
