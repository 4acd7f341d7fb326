"""Conversion of NumPy arrays to TensorData and back, without torch."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

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


def to_numpy(tensor: TensorData) -> NDArray[Any]:
    """Return a view of the tensor; bfloat16, which numpy does not have, is copied as float32."""
    if tensor.dtype == "bfloat16":
        upper = np.frombuffer(tensor.data, "<u2").astype("<u4") << 16
        return upper.view("<f4").reshape(tensor.shape)
    dtype = np.dtype(tensor.dtype).newbyteorder("<")
    return np.frombuffer(tensor.data, dtype).reshape(tensor.shape)
