"""Detection of quantized weights, which a reader describes or which are refused.

Without their scales, quantized weights are loaded as if they were the values, and the model gives
wrong answers. A folder is refused if its settings name a format without a reader, if a tensor does
not fit the format, and if a tensor is quantized and no reader claims it.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.vision.formats import FLOATS, READERS, Contradiction, QuantizedWeight, Reader, Tensors
from shared.vision.weight_files import (
    TensorHeader,
    list_model_files,
    read_header,
    read_headers,
    read_index,
)

SETTINGS = ("quantization_config", "compression_config", "quantization")
"""Keys of config.json and its sections."""
MODELOPT_FILE = "hf_quant_config.json"
SETTINGS_FILES = frozenset(
    {MODELOPT_FILE, "quant_config.json", "quantize_config.json", "quanto_qmap.json"}
)
"""Files in which some tools write such settings instead."""
# Places of settings that readers may claim.
_PLACES = re.compile(r"(text_config\.)?(quantization|compression)_config")
# Files that repeat the settings of config.json, by the method of those.
_COPIES = {"awq": "quant_config.json", "gptq": "quantize_config.json"}

# Tensors of formats that replace a weight by several tensors.
_PART = re.compile(
    r"(^|[._])(qweight|qzeros|g_idx|absmax|quant_map|weight_packed|proj_blocks|SCB)$"
)
_SCALE = re.compile(r"(^|[._:])(scales?|scale_inv|scale_2|zeros?|zero_points?)$")


class Quantized(NamedTuple):
    """The quantized weights of a folder in a format that is read."""

    label: str
    """Name of the format, for users."""
    weights: list[QuantizedWeight]
    claimed: frozenset[str]
    """Tensors that the weights are computed from, and tensors that serving does not need."""


def read_quantized(folder: Path) -> Quantized | None:
    """Return the quantized weights of a folder; None if all its weights are floats.

    As long as a file of weights is missing, the list of weights is empty. Raises ConfigError for
    weights that are refused.
    """
    try:
        return _examine(folder)
    except Contradiction as error:
        raise ConfigError(f"models.path: {folder} {error}", field="models.path") from error


def find_quantization(folder: Path) -> str | None:
    """Return the reason to refuse the weights of a folder; None if they can be read.

    This checks the settings, the types of weights and the names of tensors, as far as the files
    exist. Raises ConfigError for weights that cannot be read.
    """
    try:
        _examine(folder)
    except Contradiction as error:
        return str(error)
    return None


def read_shapes(folder: Path) -> Iterator[tuple[str, list[int]]]:
    """Return the name and shape of each weight, as the model has it. Raises ConfigError."""
    quantized = read_quantized(folder)
    claimed = frozenset() if quantized is None else quantized.claimed
    yield from ((name, t.shape) for name, t in read_headers(folder) if name not in claimed)
    if quantized is not None:
        yield from ((weight.name, weight.shape) for weight in quantized.weights)


def read_kept_sizes(folder: Path) -> dict[str, int]:
    """Return the bytes of each weight whose numbers can be kept. Raises ConfigError."""
    quantized = read_quantized(folder)
    if quantized is None:
        return {}
    dtypes = {name: tensor.dtype for name, tensor in read_headers(folder)}
    return {w.name: w.kept_bytes for w in quantized.weights if w.can_keep(dtypes[w.numbers])}


def find_quantized_tensor(
    folder: Path, model: Any, rename: Callable[[str], str], quantized: Quantized | None = None
) -> str | None:
    """Return the reason to refuse the stored weights of a loaded model, or None.

    `model` is a torch module, a type that commands without torch cannot import. `rename` maps the
    name of a stored tensor to the name in the model. Tensors of parts that the model does not have
    are skipped, and so are tensors that `quantized` claims. Raises ConfigError.
    """
    state = model.state_dict()
    owners = {*state, *(name for name, _ in model.named_modules())}
    claimed = frozenset() if quantized is None else quantized.claimed
    for stored_name, tensor in read_headers(folder):
        name = rename(stored_name)
        if stored_name in claimed:
            continue
        if name in state:
            if state[name].is_floating_point() and tensor.dtype not in FLOATS:
                return _unsupported(f"{stored_name} has the type {tensor.dtype}")
        elif _is_scale(name) and re.split(r"[.:][^.:]*$", name)[0] in owners:
            return _unsupported(f"no weight of the model is named {stored_name}")
    if quantized is None:
        return None
    # transformers does not tie two weights of a file that differ.
    tied = model.get_expanded_tied_weights_keys(all_submodels=True)
    for weight in quantized.weights:
        name = rename(weight.name)
        if name in tied:
            return f"has a quantized {weight.name}, but config.json ties it to {tied[name]}"
        if name not in state and name.rpartition(".")[0].rpartition(".")[0] in owners:
            return _unsupported(f"no weight of the model is named {weight.name}")
    return None


def _examine(folder: Path) -> Quantized | None:
    """Return the quantized weights of a folder. Raises Contradiction and ConfigError."""
    signs = _find_readers(folder)
    # Before a download, only the names are known, from the index.
    names = read_index(folder).weight_map.keys()
    if not signs:
        dtypes = dict.fromkeys(names, "")
        dtypes |= {name: tensor.dtype for name, tensor in read_headers(folder)}
        for _, sign in _find_signs(dtypes):
            raise Contradiction(_unsupported(sign))
        return None
    try:
        (label, reader), *others = ((reader.label, reader) for reader in signs.values())
        if any(label != other for other, _ in others):
            raise Contradiction("these settings name different formats")
        headers = {n: header for f in list_model_files(folder) for n, header in read_header(f)}
        if not headers or names - headers.keys():
            return Quantized(label, [], frozenset())
        return _read_weights(label, reader, headers)
    except Contradiction as error:
        raise _unreadable(" and ".join(signs), error) from error


def _read_weights(label: str, reader: Reader, headers: Mapping[str, TensorHeader]) -> Quantized:
    tensors = Tensors(headers, reader.excluded)
    weights = list(reader.read(tensors))
    if not weights:
        raise Contradiction("no tensor is quantized")
    rest = {name: h.dtype for name, h in headers.items() if name not in tensors.claimed}
    for name, _ in _find_signs(rest):
        raise Contradiction(f"{name} belongs to no quantized weight")
    for weight in weights:
        if weight.name in rest:
            raise Contradiction(f"{weight.name} is stored twice, also as {weight.numbers}")
    return Quantized(label, weights, frozenset(tensors.claimed))


def _find_readers(folder: Path) -> dict[str, Reader]:
    """Return the readers that claim the settings of a folder, by the sign of these settings.

    Raises Contradiction for settings that no reader claims.
    """
    readers: dict[str, Reader] = {}
    copies = set()
    file = folder / "config.json"
    for path, value in _find_settings(json.loads(file.read_bytes()), "") if file.is_file() else ():
        method = value.get("quant_method") if isinstance(value, dict) else None
        sign = f"config.json has {path}" + ("" if method is None else f" for {method!r:.40}")
        if _PLACES.fullmatch(path) is None or method not in READERS:
            raise Contradiction(_unsupported(sign))
        readers[sign] = _read_settings(method, sign, value)
        copies.add(_COPIES.get(method))
    for name in sorted(SETTINGS_FILES - copies):
        if (folder / name).is_file():
            sign = f"it has {name}"
            if name != MODELOPT_FILE:
                raise Contradiction(_unsupported(sign))
            readers[sign] = _read_modelopt(folder / name, sign)
    return readers


def _read_modelopt(file: Path, sign: str) -> Reader:
    try:
        settings = msgspec.json.decode(file.read_bytes(), type=dict[str, Any]).get("quantization")
    except (OSError, msgspec.MsgspecError) as error:
        raise _unreadable(sign, error) from error
    return _read_settings("modelopt", sign, settings)


def _read_settings(method: str, sign: str, settings: object) -> Reader:
    try:
        return msgspec.convert(settings, READERS[method])
    except (Contradiction, msgspec.ValidationError) as error:
        raise _unreadable(sign, error) from error


def _find_settings(section: object, path: str) -> Iterator[tuple[str, object]]:
    """Yield the settings of quantization in a section of config.json, with their paths."""
    if not isinstance(section, dict):
        return
    for key, value in section.items():
        if key in SETTINGS and value is not None:
            yield f"{path}{key}", value
        else:
            yield from _find_settings(value, f"{path}{key}.")


def _find_signs(dtypes: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the names of quantized tensors, each with the sign by which it is recognized."""
    for name, dtype in dtypes.items():
        owner = name.rpartition(".")[0]
        is_weight = name.endswith("weight") and dtype and dtype not in FLOATS
        if is_weight or dtype.startswith(("F8_", "F6_", "F4")):
            yield name, f"{name} has the type {dtype}"
        elif _PART.search(name) or (_SCALE.search(name) and f"{owner}.weight" in dtypes):
            yield name, f"it has a tensor {name}"


def _is_scale(name: str) -> bool:
    return _SCALE.search(name) is not None or _PART.search(name) is not None


def _unsupported(sign: str) -> str:
    return (
        f"has quantized weights ({sign}), which are not supported; the methods that are read are"
        f" {', '.join(READERS)}: serve the folder with the original weights, with quantization:"
        " int8 if they do not fit"
    )


def _unreadable(sign: str, error: Exception) -> Contradiction:
    return Contradiction(f"has quantized weights ({sign}) that cannot be read: {reason_of(error)}")
