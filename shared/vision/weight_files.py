"""Safetensors files of a model folder, and their headers, which list the tensors."""

import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.errors import ConfigError

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# safetensors has the same limit.
MAX_HEADER_BYTES = 100_000_000


class TensorHeader(msgspec.Struct, frozen=True):
    """Type and shape of a stored tensor."""

    dtype: str = ""
    """Name of the type in safetensors; empty for a tensor that is only in the index."""
    shape: list[int] = []


class WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}
    """File of each tensor."""


def read_index(folder: Path) -> WeightIndex:
    """Return the index of a folder with several files of weights; empty for other folders.

    Raises ConfigError.
    """
    file = folder / INDEX
    if not file.is_file():
        return WeightIndex()
    try:
        return msgspec.json.decode(file.read_bytes(), type=WeightIndex)
    except (OSError, msgspec.MsgspecError) as error:
        raise _refusal(f"{file} cannot be read: {error}") from error


def list_model_files(folder: Path) -> list[Path]:
    """Return the files from which transformers reads the weights, as far as they exist.

    Raises ConfigError.
    """
    file = folder / WEIGHTS
    shards = {folder / shard for shard in read_index(folder).weight_map.values()}
    return [file] if file.is_file() else sorted(shard for shard in shards if shard.is_file())


def read_headers(folder: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Return the name and header of each tensor of a model. Raises ConfigError.

    A folder may have other files of tensors, such as the weights in the format of another program.
    """
    for file in list_model_files(folder):
        yield from read_header(file)


def read_header(file: Path) -> Iterator[tuple[str, TensorHeader]]:
    """Return the name and header of each tensor in a file. Raises ConfigError."""
    try:
        with file.open("rb") as weights:
            (header_len,) = struct.unpack("<Q", weights.read(8))
            if header_len > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_len} bytes")
            header = msgspec.json.decode(weights.read(header_len), type=dict[str, msgspec.Raw])
        for name, raw in header.items():
            if name != "__metadata__":
                yield name, msgspec.json.decode(raw, type=TensorHeader)
    except (OSError, ValueError, struct.error, msgspec.MsgspecError) as error:
        raise _refusal(f"{file} is not a safetensors file: {error}") from error


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"models.path: {reason}", field="models.path")
