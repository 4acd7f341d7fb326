"""Conversion between TensorData and torch tensors or numpy arrays."""

import warnings

import torch

from shared.codec.envelope import ITEM_BYTES, TensorData

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# torch warns once per process about a read-only buffer. These buffers are read-only by contract, so
# the warning is triggered and hidden here; a lasting filter would also hide other warnings.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def to_torch(tensor: TensorData) -> torch.Tensor:
    """Return a CPU tensor over the same memory. Clone it before writing to it."""
    dtype = _DTYPES[tensor.dtype]
    if not tensor.data.nbytes:  # frombuffer refuses it
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)


def from_torch(tensor: torch.Tensor) -> TensorData:
    """Return a view of a contiguous CPU tensor; any other tensor is copied once.

    Raises ValueError for an unsupported dtype or layout.
    """
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype} and {tensor.layout} cannot be sent")
    # Converted as bytes, because numpy has no bfloat16; flat, because a scalar has no byte view.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorData(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data)
