"""Restores pixels that another server has processed to 8 bits and a table of their values."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import WireField
from shared.errors import InvalidRequest

NUM_VALUES = 256


def tensors_of(wire: Mapping[str, WireField], names: Sequence[str], field: str) -> list[TensorData]:
    """Return the tensors of the fields `names`. Raises InvalidRequest for other fields."""
    if wire.keys() != set(names):
        raise InvalidRequest(
            f"an item of this kind has the fields {', '.join(names)}, not {', '.join(wire)}",
            field=field,
        )
    return [wire[name].tensor for name in names]


def check_shape(name: str, tensor: TensorData, shape: tuple[int, ...], field: str) -> None:
    """Raise InvalidRequest for another shape."""
    if tensor.shape != shape:
        raise InvalidRequest(
            f"{name} has the shape {list(tensor.shape)}, not {list(shape)}", field=field
        )


def to_values(pixels: NDArray[np.uint8], table: TensorData) -> NDArray[np.float32]:
    """Return the normalised values of `pixels` [rows, channels, ...] by a table [channels, 256]."""
    channels = np.arange(pixels.shape[1]).reshape(-1, *[1] * (pixels.ndim - 2))
    values: NDArray[np.float32] = to_numpy(table)[channels, pixels]
    return values


def to_pixels(
    values: NDArray[Any], table: TensorData, field: str
) -> tuple[NDArray[np.uint8], TensorData]:
    """Return `values` [rows, channels, ...] as 8-bit indexes into a table, and that table.

    The table is float32 [channels, 256]. If the values are pixels, or if all of them are in the
    model's `table`, that table is returned. With any normalisation, an 8-bit image has at most 256
    different values in a channel, so the values are restored bit for bit. Raises InvalidRequest for
    values that no 8-bit image can have.
    """
    if values.dtype == np.uint8:
        return values, table
    if not np.issubdtype(values.dtype, np.floating):
        raise InvalidRequest(f"pixel_values are {values.dtype}, not uint8 or floats", field=field)
    values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise InvalidRequest("pixel_values are not finite", field=field)
    places = [np.searchsorted(row, values[:, i]) for i, row in enumerate(to_numpy(table))]
    indexes = np.stack(places, axis=1).clip(max=NUM_VALUES - 1).astype(np.uint8)
    if to_values(indexes, table).tobytes() == values.tobytes():
        return indexes, table
    pixels = np.empty(values.shape, np.uint8)
    own_table = np.zeros((values.shape[1], NUM_VALUES), np.float32)
    for channel in range(values.shape[1]):
        levels, level_indexes = np.unique(values[:, channel], return_inverse=True)
        if len(levels) > NUM_VALUES:
            raise InvalidRequest(
                f"pixel_values have {len(levels)} different values in a channel, more than the"
                f" {NUM_VALUES} of 8-bit pixels",
                field=field,
            )
        own_table[channel, : len(levels)] = levels
        pixels[:, channel] = level_indexes.reshape(pixels[:, channel].shape)
    return pixels, from_numpy(own_table)
