"""Detection of quantized weights. They are refused, because no reader restores their values.

Without their scales, quantized weights are loaded as if they were the values, and the model gives
wrong answers. A reader of a format must exempt its setting and its tensors in this module.
"""

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from shared.vision.weight_files import read_headers, read_index

SETTINGS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json and its sections."""
SETTINGS_FILES = frozenset(
    {"hf_quant_config.json", "quant_config.json", "quantize_config.json", "quanto_qmap.json"}
)
"""Files in which some tools write such settings instead."""
FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
"""Types of tensors that are not quantized."""

# Tensors of formats that replace a weight by several tensors.
_PART = re.compile(r"(^|[._])(qweight|qzeros|g_idx|absmax|quant_map|weight_packed|SCB)$")
_SCALE = re.compile(r"(^|[._:])(scales?|scale_inv|scale_2|zeros?|zero_points?)$")


def find_quantization(folder: Path) -> str | None:
    """Return the reason to refuse the weights of a folder as quantized; None if they are floats.

    This checks the settings, the types of weights and the names of tensors, as far as the files
    exist. Raises ConfigError for weights that cannot be read.
    """
    return next((_reason(sign) for sign in _signs(folder)), None)


def find_quantized_tensor(folder: Path, model: Any, rename: Callable[[str], str]) -> str | None:
    """Return the reason to refuse the stored weights of a loaded model; None if all are floats.

    `model` is a torch module, a type that commands without torch cannot import. `rename` maps the
    name of a stored tensor to the name in the model. Tensors of parts that the model does not have
    are skipped. Raises ConfigError.
    """
    state = model.state_dict()
    owners = {*state, *(name for name, _ in model.named_modules())}
    for stored_name, tensor in read_headers(folder):
        name = rename(stored_name)
        if name in state:
            if state[name].is_floating_point() and tensor.dtype not in FLOATS:
                return _reason(f"{stored_name} has the type {tensor.dtype}")
        elif _is_scale(name) and re.split(r"[.:][^.:]*$", name)[0] in owners:
            return _reason(f"no weight of the model is named {stored_name}")
    return None


def _signs(folder: Path) -> Iterator[str]:
    for name in sorted(SETTINGS_FILES):
        if (folder / name).is_file():
            yield f"it has {name}"
    config = folder / "config.json"
    if config.is_file():
        yield from _read_settings(json.loads(config.read_bytes()), "")
    # Before a download, only the names are known, from the index.
    names = dict.fromkeys(read_index(folder).weight_map, "")
    names |= {name: tensor.dtype for name, tensor in read_headers(folder)}
    for name, dtype in names.items():
        owner = name.rpartition(".")[0]
        is_weight = name.endswith("weight") and dtype and dtype not in FLOATS
        if is_weight or dtype.startswith(("F8_", "F6_", "F4")):
            yield f"{name} has the type {dtype}"
        elif _PART.search(name) or (_SCALE.search(name) and f"{owner}.weight" in names):
            yield f"it has a tensor {name}"


def _read_settings(section: object, path: str) -> Iterator[str]:
    if not isinstance(section, dict):
        return
    for key, value in section.items():
        if key in SETTINGS and value is not None:
            method = value.get("quant_method") if isinstance(value, dict) else None
            named = "" if method is None else f" for {method!r:.40}"
            yield f"config.json has {path}{key}{named}"
        else:
            yield from _read_settings(value, f"{path}{key}.")


def _is_scale(name: str) -> bool:
    return _SCALE.search(name) is not None or _PART.search(name) is not None


def _reason(sign: str) -> str:
    return (
        f"has quantized weights ({sign}), which are not supported: serve the folder with the"
        " original weights, with quantization: int8 if they do not fit"
    )
