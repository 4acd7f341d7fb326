"""Writer of quantized checkpoints in numpy, from the published descriptions of the formats.

It shares no code with the readers of the product, nor with torch. Each form turns a weight into
tensors, and returns with them the values that the tensors stand for.
"""

import json
import shutil
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Stored = tuple[str, Array]
"""Name of the type in safetensors, and an array of the same size of elements."""

WEIGHTS = "model.safetensors"
GROUP, BLOCK = 32, (48, 40)
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)


def read_file(file: Path) -> dict[str, Stored]:
    """Read a safetensors file with floats, as float32."""
    content = file.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(content[8 : 8 + length])
    header.pop("__metadata__", None)
    tensors = {}
    for name, entry in header.items():
        first, end = (8 + length + offset for offset in entry["data_offsets"])
        tensors[name] = ("F32", _as_float32(entry["dtype"], content[first:end], entry["shape"]))
    return tensors


def _as_float32(dtype: str, content: bytes, shape: list[int]) -> Array:
    if dtype == "BF16":  # The upper half of a float32.
        values = (np.frombuffer(content, np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        types: dict[str, Any] = {"F16": np.float16, "F32": np.float32}
        values = np.frombuffer(content, types[dtype]).astype(np.float32)
    return values.reshape(shape)


def write_file(file: Path, tensors: Mapping[str, Stored]) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data, offset = [], 0
    for name, (dtype, values) in tensors.items():
        content = np.ascontiguousarray(values).tobytes()
        offsets = [offset, offset := offset + len(content)]
        header[name] = {"dtype": dtype, "shape": list(values.shape), "data_offsets": offsets}
        data.append(content)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + b"".join(data))


# -- numbers --------------------------------------------------------------------------------------


def _e4m3_table() -> Array:
    """The values of the 128 positive 8-bit floats with 4 bits of exponent and 3 of mantissa."""
    values = []
    for code in range(128):
        exponent, mantissa = code >> 3, code & 7
        if exponent == 0:
            values.append(mantissa / 8 * 2.0**-6)
        elif code == 127:
            values.append(np.nan)
        else:
            values.append((1 + mantissa / 8) * 2.0 ** (exponent - 7))
    return np.array(values, np.float32)


E4M3 = _e4m3_table()


def round_to(table: Array, values: Array) -> Array:
    """Return the code of the nearest value of a table of positive numbers, plus the sign."""
    codes = np.abs(table[: len(E4M3) - 1] - np.abs(values)[..., None]).argmin(-1)
    signed: Array = (codes + len(table) * (values < 0)).astype(np.uint8)
    return signed


def values_of(table: Array, codes: Array) -> Array:
    values: Array = np.concatenate([table, -table])[codes]
    return values


def spread(grid: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """Repeat the scale of each block for the elements of a matrix."""
    rows, columns = shape
    repeated = grid.repeat(block[0], 0).repeat(block[1], 1)
    return repeated[:rows, :columns]


def largest(weight: Array, block: tuple[int, int]) -> Array:
    """Return the largest magnitude in each block."""
    rows, columns = weight.shape
    grid = [
        [
            np.abs(weight[row : row + block[0], column : column + block[1]]).max()
            for column in range(0, columns, block[1])
        ]
        for row in range(0, rows, block[0])
    ]
    return np.array(grid, np.float32)


def pack(codes: Array, bits: int, order: list[int] | None = None) -> Array:
    """Pack the last dimension into integers of 32 bits, the first number in the lowest bits."""
    per_word = 32 // bits
    order = order or list(range(per_word))
    words = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_word), np.uint32)
    for place, column in enumerate(order):
        words |= codes[..., column::per_word].astype(np.uint32) << np.uint32(bits * place)
    return words.view(np.int32)


def pack_bytes(codes: Array) -> Array:
    """Pack two 4-bit codes into each byte, the first one in the lower bits."""
    packed: Array = codes[..., 0::2] | codes[..., 1::2] << 4
    return packed


# -- forms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Form:
    """A format: its settings, and the function that writes a weight in it."""

    settings: dict[str, Any]
    write: Callable[[str, Array], tuple[dict[str, Stored], Array]]
    label: str
    file: str | None = None
    """File of the settings; by default they are in config.json."""
    key: str = "quantization_config"
    ending: str = "proj.weight"
    """Ending of the weights that are written in the format."""
    others: dict[str, Any] = field(default_factory=dict)
    """Further entries of config.json."""


def _fp8(
    weight: Array, block: tuple[int | None, int | None], exponents: bool = False
) -> tuple[Array, Array, Array]:
    """Return codes, the grid of scales, and values."""
    if weight.ndim == 3:
        parts = [_fp8(matrix, block, exponents) for matrix in weight]
        codes, scales, values = (np.stack(part) for part in zip(*parts, strict=True))
        return codes, scales, values
    size = (block[0] or weight.shape[0], block[1] or weight.shape[1])
    scales = largest(weight, size) / np.float32(448)
    if exponents:
        scales = np.exp2(np.ceil(np.log2(scales))).astype(np.float32)
    spreaded = spread(scales, size, weight.shape)
    codes = round_to(E4M3, weight / spreaded)
    return codes, scales, values_of(E4M3, codes) * spreaded


def fp8_blocks(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    codes, scales, values = _fp8(weight, BLOCK)
    return {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scales)}, values


def fp8_exponents(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    codes, scales, values = _fp8(weight, BLOCK, exponents=True)
    stored = (np.log2(scales) + 127).astype(np.uint8)
    return {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F8_E8M0", stored)}, values


def fp8_tensor(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    codes, scales, values = _fp8(weight, (None, None))
    owner = name.removesuffix("weight")
    return {
        name: ("F8_E4M3", codes),
        f"{name}_scale": ("F32", scales.reshape(())),
        f"{owner}input_scale": ("F32", np.ones((), np.float32)),
        f"{owner}k_scale": ("F32", np.ones(1, np.float32)),
    }, values


def fp8_channels(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    codes, scales, values = _fp8(weight, (1, None))
    return {name: ("F8_E4M3", codes), f"{name}_scale": ("F32", scales)}, values


def int8_channels(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    scales = np.abs(weight).max(1, keepdims=True) / np.float32(127)
    codes = np.rint(weight / scales).astype(np.int8)
    return {name: ("I8", codes), f"{name}_scale": ("F32", scales)}, codes * scales


def int8_zeros(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    """Write asymmetric 8-bit numbers with one scale and one zero per tensor."""
    scale = np.float32((weight.max() - weight.min()) / 255).reshape(1)
    zero = np.rint(-128 - weight.min() / scale).astype(np.int8)
    codes = np.clip(np.rint(weight / scale) + zero, -128, 127).astype(np.int8)
    values = (codes.astype(np.float32) - zero) * scale
    tensors = {
        name: ("I8", codes),
        f"{name}_scale": ("F32", scale),
        f"{name}_zero_point": ("I8", zero),
    }
    return tensors, values


def _unsigned(weight: Array, bits: int, size: int) -> tuple[Array, Array, Array]:
    """Return unsigned codes, scales in float16 and zeros, for groups of inputs."""
    groups = weight.reshape(len(weight), -1, size)
    low = np.minimum(groups.min(2), 0)
    scales = ((np.maximum(groups.max(2), 0) - low) / (2**bits - 1)).astype(np.float16)
    zeros = np.clip(np.rint(-low / scales), 0, 2**bits - 1).astype(np.int32)
    wide = scales.astype(np.float32)[..., None]
    codes = np.clip(np.rint(groups / wide) + zeros[..., None], 0, 2**bits - 1).astype(np.int32)
    return codes.reshape(weight.shape), scales, zeros


def _values(codes: Array, scales: Array, zeros: Array, groups: Array) -> Array:
    """Return the values of unsigned codes; `groups` is the group of each input."""
    values: Array = (codes - zeros[:, groups]).astype(np.float32)
    return values * scales.astype(np.float32)[:, groups]


def _shape_of(weight: Array) -> Stored:
    return "I64", np.array(weight.shape, np.int64)


def packed(bits: int, size: int | None, ordered: bool = True) -> Callable[..., Any]:
    """Return the writer of symmetric packed numbers of compressed-tensors."""

    def write(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
        num_inputs = weight.shape[1]
        groups = np.arange(num_inputs) // (size or num_inputs)
        if not ordered:
            groups = np.random.default_rng(3).permutation(groups)
        scales = np.stack(
            [np.abs(weight[:, groups == group]).max(1) for group in range(groups.max() + 1)], 1
        ) / np.float32(2 ** (bits - 1) - 1)
        codes = np.rint(weight / scales[:, groups]).astype(np.int32)
        values = codes.astype(np.float32) * scales[:, groups]
        tensors: dict[str, Stored] = {
            f"{name}_packed": ("I32", pack(codes + 2 ** (bits - 1), bits)),
            f"{name}_scale": ("F32", scales),
            f"{name}_shape": _shape_of(weight),
        }
        if not ordered:
            tensors[f"{name}_g_idx"] = ("I32", groups.astype(np.int32))
        return tensors, values

    return write


def packed_zeros(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    """Write asymmetric packed numbers. Zeros are packed along the outputs."""
    codes, scales, zeros = _unsigned(weight, 4, GROUP)
    return {
        f"{name}_packed": ("I32", pack(codes, 4)),
        f"{name}_scale": ("F16", scales),
        f"{name}_zero_point": ("I32", pack(zeros.T, 4).T),
        f"{name}_shape": _shape_of(weight),
    }, _values(codes, scales, zeros, np.arange(weight.shape[1]) // GROUP)


def awq(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    codes, scales, zeros = _unsigned(weight, 4, GROUP)
    owner = name.removesuffix("weight")
    return {
        f"{owner}qweight": ("I32", pack(codes.T, 4, AWQ_ORDER)),
        f"{owner}qzeros": ("I32", pack(zeros.T, 4, AWQ_ORDER)),
        f"{owner}scales": ("F16", scales.T),
    }, _values(codes, scales, zeros, np.arange(weight.shape[1]) // GROUP)


def gptq(bits: int, version: int = 1, ordered: bool = True) -> Callable[..., Any]:
    def write(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
        num_inputs = weight.shape[1]
        order = np.arange(num_inputs)
        if not ordered:
            order = np.random.default_rng(3).permutation(order)
        # The inputs of a group follow each other in this order.
        codes, scales, zeros = _unsigned(weight[:, order], bits, GROUP)
        groups = np.empty(num_inputs, np.int32)
        groups[order] = np.arange(num_inputs) // GROUP
        codes = codes[:, np.argsort(order)]
        owner = name.removesuffix("weight")
        return {
            f"{owner}qweight": ("I32", pack(codes, bits).T),
            f"{owner}qzeros": ("I32", pack((zeros.T - (version == 1)) % 2**bits, bits)),
            f"{owner}scales": ("F16", scales.T),
            f"{owner}g_idx": ("I32", groups),
        }, _values(codes, scales, zeros, groups)

    return write


def _mxfp4(weight: Array) -> tuple[Array, Array, Array]:
    """Return codes, biased exponents and values for groups of 32 inputs."""
    groups = weight.reshape(*weight.shape[:-1], -1, 32)
    exponents = np.floor(np.log2(np.abs(groups).max(-1))) - 2
    scales = np.exp2(exponents).astype(np.float32)[..., None]
    codes = round_to(E2M1, groups / scales)
    values = values_of(E2M1, codes) * scales
    return codes, (exponents + 127).astype(np.uint8), values.reshape(weight.shape)


def mxfp4_packed(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    codes, exponents, values = _mxfp4(weight)
    packed_codes = pack_bytes(codes.reshape(weight.shape))
    return {f"{name}_packed": ("U8", packed_codes), f"{name}_scale": ("U8", exponents)}, values


def mxfp4_experts(name: str, weight: Array) -> tuple[dict[str, Stored], Array]:
    """Write experts, which have a row for each input, in groups of 16 bytes for each output."""
    codes, exponents, values = _mxfp4(weight.swapaxes(1, 2))
    tensors = {
        f"{name}_blocks": ("U8", pack_bytes(codes)),
        f"{name}_scales": ("U8", exponents),
    }
    return tensors, values.swapaxes(1, 2)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*visual.*"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "input_activations": None, "weights": weights}
        },
    }


FP8: dict[str, Any] = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic"}
FP8_BLOCKS = FP8 | {"weight_block_size": list(BLOCK), "modules_to_not_convert": ["lm_head"]}
MODELOPT = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}
AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": GROUP,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": ["visual"],
}
GPTQ: dict[str, Any] = {
    "quant_method": "gptq",
    "bits": 4,
    "group_size": GROUP,
    "desc_act": False,
    "sym": False,
    "checkpoint_format": "gptq",
}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
INT8: dict[str, Any] = {"num_bits": 8, "type": "int"}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
TEXT_BLOCKS = f"blocks of {BLOCK[0]} x {BLOCK[1]}"

FORMS = {
    "fp8_blocks": Form(FP8_BLOCKS, fp8_blocks, f"FP8, {TEXT_BLOCKS}"),
    "fp8_exponents": Form(FP8_BLOCKS, fp8_exponents, f"FP8, {TEXT_BLOCKS}"),
    "fp8_tensor": Form(FP8, fp8_tensor, "FP8, one scale per tensor"),
    "fbgemm": Form({"quant_method": "fbgemm_fp8"}, fp8_channels, "FP8, one scale per channel"),
    "modelopt": Form(
        MODELOPT | {"quant_method": "modelopt", "ignore": ["lm_head", "*visual*"]},
        fp8_tensor,
        "FP8, one scale per tensor",
    ),
    "modelopt_file": Form(
        {"producer": {"name": "modelopt"}, "quantization": MODELOPT},
        fp8_tensor,
        "FP8, one scale per tensor",
        file="hf_quant_config.json",
    ),
    "float_channels": Form(
        compressed("float-quantized", **FLOAT8, strategy="channel"),
        fp8_channels,
        "FP8, one scale per channel (compressed-tensors)",
    ),
    "float_tensor": Form(
        compressed("float-quantized", **FLOAT8, strategy="tensor"),
        fp8_tensor,
        "FP8, one scale per tensor (compressed-tensors)",
        key="compression_config",
    ),
    "int8_channels": Form(
        compressed("int-quantized", **INT8, strategy="channel"),
        int8_channels,
        "int8, one scale per channel (compressed-tensors)",
    ),
    "int8_zeros": Form(
        compressed("int-quantized", **INT8, strategy="tensor", symmetric=False),
        int8_zeros,
        "int8, one scale per tensor (compressed-tensors)",
    ),
    "packed_int4": Form(
        compressed("pack-quantized", **INT4),
        packed(4, GROUP),
        f"int4, groups of {GROUP} (compressed-tensors)",
    ),
    "packed_int4_ordered": Form(
        compressed("pack-quantized", **INT4, actorder="group"),
        packed(4, GROUP, ordered=False),
        f"int4, groups of {GROUP} (compressed-tensors)",
    ),
    "packed_int4_zeros": Form(
        compressed("pack-quantized", **INT4, symmetric=False),
        packed_zeros,
        f"int4, groups of {GROUP} (compressed-tensors)",
    ),
    "packed_int8": Form(
        compressed("pack-quantized", **INT8, strategy="channel"),
        packed(8, None),
        "int8, one scale per channel (compressed-tensors)",
    ),
    "packed_mxfp4": Form(
        compressed("mxfp4-pack-quantized", num_bits=4, type="float", group_size=32),
        mxfp4_packed,
        "MXFP4, groups of 32 (compressed-tensors)",
    ),
    "awq": Form(AWQ, awq, f"int4, groups of {GROUP} (AWQ)"),
    "gptq": Form(GPTQ, gptq(4), f"int4, groups of {GROUP} (GPTQ)"),
    "gptq_ordered": Form(
        GPTQ | {"desc_act": True}, gptq(4, ordered=False), f"int4, groups of {GROUP} (GPTQ)"
    ),
    "gptq_v2": Form(
        GPTQ | {"checkpoint_format": "gptq_v2"}, gptq(4, 2), f"int4, groups of {GROUP} (GPTQ)"
    ),
    "gptq_int8": Form(GPTQ | {"bits": 8}, gptq(8), f"int8, groups of {GROUP} (GPTQ)"),
    "gptq_int2": Form(GPTQ | {"bits": 2}, gptq(2), f"int2, groups of {GROUP} (GPTQ)"),
}


def quantize(folder: Path, twin: Path, form: Form) -> list[str]:
    """Write the decoder of a float model in a form, and its values to `twin`, a copy of `folder`.

    Returns the names of the weights.
    """
    stored, meant, names = {}, {}, []
    for name, (dtype, weight) in read_file(folder / WEIGHTS).items():
        stored[name] = meant[name] = (dtype, weight)
        if ".layers." in name and name.endswith(form.ending):
            del stored[name]
            tensors, values = form.write(name, weight)
            stored |= tensors
            meant[name] = ("F32", values)
            names.append(name)
    write_file(folder / WEIGHTS, stored)
    write_file(twin / WEIGHTS, meant)
    set_settings(folder, form)
    return names


def copy_quantized(folder: Path, target: Path, form: Form) -> tuple[Path, Path]:
    """Copy a model folder to `target` twice: in a form, and with the values of that form."""
    copies = target / "quantized", target / "twin"
    for copied in copies:
        shutil.copytree(folder, copied, ignore=shutil.ignore_patterns("training"))
        write_file(copied / WEIGHTS, read_file(copied / WEIGHTS))
    quantize(*copies, form)
    return copies


def set_settings(folder: Path, form: Form) -> None:
    if form.file is not None:
        (folder / form.file).write_text(json.dumps(form.settings))
    else:
        file = folder / "config.json"
        config = json.loads(file.read_text())
        file.write_text(json.dumps(config | {form.key: form.settings} | form.others))
