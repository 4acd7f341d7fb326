"""Safetensors files of a model folder, and their headers, which list the tensors."""

import math
import os
import struct
from collections.abc import Iterator
from pathlib import Path

import msgspec

from shared.errors import ConfigError
from shared.helpers.validation import reason_of

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# safetensors has the same limit.
MAX_HEADER_BYTES = 100_000_000
_BITS = {
    **dict.fromkeys(("F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 16),
    **dict.fromkeys(("F8_E4M3", "F8_E5M2", "F8_E8M0", "I8", "U8", "BOOL"), 8),
}
GIT_LFS = b"version "


class TensorHeader(msgspec.Struct, frozen=True):
    """Type and shape of a stored tensor."""

    dtype: str = ""
    """Name of the type in safetensors; empty for a tensor that is only in the index."""
    shape: list[int] = []
    data_offsets: tuple[int, int] = (0, 0)
    """First byte after the header, and the byte after the last one."""

    def check(self, data_len: int) -> None:
        """Raise ValueError if the tensor is not in the file, which has `data_len` bytes of data."""
        first, end = self.data_offsets
        if not 0 <= first <= end <= data_len:
            raise ValueError(f"has the bytes {first} to {end}, but the file has {data_len} of data")
        bits = _BITS.get(self.dtype)
        if bits is not None and math.prod(self.shape) * bits != 8 * (end - first):
            raise ValueError(
                f"has {end - first} bytes, which do not fit its type {self.dtype} and its shape"
                f" {self.shape}"
            )


class WeightIndex(msgspec.Struct, frozen=True):
    weight_map: dict[str, str] = {}
    """File of each tensor."""


def read_index(folder: Path, name: str = INDEX) -> WeightIndex:
    """Return the index of a folder with several files of weights; empty for other folders.

    Raises ConfigError.
    """
    file = folder / name
    if not file.is_file():
        return WeightIndex()
    try:
        return msgspec.json.decode(file.read_bytes(), type=WeightIndex)
    except (OSError, msgspec.MsgspecError) as error:
        raise _refusal(f"{file} cannot be read: {reason_of(error)}") from error


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
            start = weights.read(8)
            if start == GIT_LFS:
                raise ValueError("it is a pointer of Git LFS: download the file that it stands for")
            if len(start) < 8:
                raise ValueError(f"it has {len(start)} bytes")
            (header_len,) = struct.unpack("<Q", start)
            if header_len > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {header_len} bytes")
            header = msgspec.json.decode(weights.read(header_len), type=dict[str, msgspec.Raw])
            data_len = os.fstat(weights.fileno()).st_size - 8 - header_len
        for name, raw in header.items():
            if name != "__metadata__":
                tensor = msgspec.json.decode(raw, type=TensorHeader)
                try:
                    tensor.check(data_len)
                except ValueError as error:
                    raise ValueError(f"{name} {error}") from error
                yield name, tensor
    except (OSError, ValueError, msgspec.MsgspecError) as error:
        raise _refusal(f"{file} is not a safetensors file: {reason_of(error)}") from error


def _refusal(reason: str) -> ConfigError:
    return ConfigError(f"models.path: {reason}", field="models.path")
