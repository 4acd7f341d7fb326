"""Conversion of NumPy arrays to TensorData; unlike `shared.codec.tensors` it loads no torch."""

from typing import Any

import numpy as np

from shared.codec.envelope import ITEM_BYTES, TensorData


def from_numpy(array: np.ndarray[Any, Any]) -> TensorData:
    """Return a view of a C-ordered array; any other array is copied once.

    Raises ValueError for a dtype that cannot be sent.
    """
    name = array.dtype.newbyteorder("=").name
    if name not in ITEM_BYTES:
        raise ValueError(f"an array of {array.dtype} cannot be sent")
    flat = np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<")).reshape(-1)
    return TensorData(name, array.shape, flat.view(np.uint8).data)
