"""TensorData to torch tensors and back; the only shared module that loads torch."""

import warnings

import torch

from shared.codec.envelope import ITEM_BYTES, TensorData

_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in ITEM_BYTES}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}

# torch warns about a read-only buffer once in a process. Ours are read-only by contract, so the
# warning is used up here; a lasting filter would also silence other people's.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    torch.frombuffer(b"\0", dtype=torch.uint8)


def to_torch(tensor: TensorData) -> torch.Tensor:
    """A CPU tensor over the same memory: never write to it, clone it first."""
    dtype = _DTYPES[tensor.dtype]
    if not tensor.data.nbytes:  # which frombuffer refuses
        return torch.empty(tensor.shape, dtype=dtype)
    return torch.frombuffer(tensor.data, dtype=dtype).reshape(tensor.shape)


def from_torch(tensor: torch.Tensor) -> TensorData:
    """A view of a contiguous CPU tensor; anything else is copied once.

    Raises ValueError for a dtype or a layout that does not travel.
    """
    if tensor.dtype not in _NAMES or tensor.layout is not torch.strided:
        raise ValueError(f"a tensor of {tensor.dtype} and {tensor.layout} cannot be sent")
    # Through bytes, because numpy has no bfloat16; flat, because a scalar has no byte view.
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return TensorData(_NAMES[tensor.dtype], tuple(tensor.shape), flat.numpy().data)
