"""Pictures that other servers have processed, as 8-bit pixels and what each value stands for."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_numpy
from shared.codec.vllm_kwargs import WireField
from shared.errors import InvalidRequest

NUM_VALUES = 256


def tensors_of(wire: Mapping[str, WireField], names: Sequence[str], field: str) -> list[TensorData]:
    """The fields of these names, which must be all. Raises InvalidRequest."""
    if wire.keys() != set(names):
        raise InvalidRequest(
            f"a picture of this model has the fields {', '.join(names)}, this one"
            f" {', '.join(wire)}",
            field=field,
        )
    return [wire[name].tensor for name in names]


def check_shape(name: str, tensor: TensorData, shape: tuple[int, ...], field: str) -> None:
    """Raises InvalidRequest."""
    if tensor.shape != shape:
        raise InvalidRequest(
            f"{name} has the shape {list(tensor.shape)}, not {list(shape)}", field=field
        )


def to_numpy(tensor: TensorData) -> NDArray[Any]:
    """A view; bfloat16, which numpy does not have, becomes float32."""
    if tensor.dtype == "bfloat16":
        upper = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return upper.view("<f4").reshape(tensor.shape)
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)


def indexed(
    values: NDArray[Any], table: TensorData, field: str
) -> tuple[NDArray[np.uint8], TensorData]:
    """`values` [rows, channels, ...] as indexes into a table, float32 [channels, 256], and that.

    What are pixels already stay so, with the model's own `table`. What an 8-bit picture has been
    normalised to, in whatever way, has no more values in a channel than there are places; they are
    restored bit for bit. Raises InvalidRequest for any other.
    """
    if values.dtype == np.uint8:
        return values, table
    if not np.issubdtype(values.dtype, np.floating):
        raise InvalidRequest(f"pixel_values are {values.dtype}, not uint8 or floats", field=field)
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidRequest("pixel_values are not finite", field=field)
    pixels = np.empty(values.shape, np.uint8)
    own = np.zeros((values.shape[1], NUM_VALUES), np.float32)
    for channel in range(values.shape[1]):
        found, places = np.unique(values[:, channel], return_inverse=True)
        if len(found) > NUM_VALUES:
            raise InvalidRequest(
                f"pixel_values have {len(found)} different values in a channel, more than the"
                f" {NUM_VALUES} of an 8-bit picture",
                field=field,
            )
        own[channel, : len(found)] = found
        pixels[:, channel] = places.reshape(pixels[:, channel].shape)
    return pixels, from_numpy(own)
