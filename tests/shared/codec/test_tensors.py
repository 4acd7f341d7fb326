import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shared.codec.arrays import from_numpy
from shared.codec.envelope import ITEM_BYTES, TensorData, decode, encode
from shared.codec.tensors import from_torch, to_torch
from shared.protocol.records import StageSpan

shapes = st.lists(st.integers(0, 5), max_size=4)


def some_tensor(dtype: str, shape: list[int]) -> Tensor:
    torch.manual_seed(0)
    return (torch.randn(shape) * 50).to(getattr(torch, dtype))


@given(st.sampled_from(sorted(ITEM_BYTES)), shapes)
def test_every_dtype_and_shape_round_trips(dtype: str, shape: list[int]) -> None:
    tensor = some_tensor(dtype, shape)
    data = encode(StageSpan("r", "w", 1, 0.0, 0.0), [from_torch(tensor)])
    received = to_torch(decode(data, StageSpan)[1][0])
    assert received.dtype == tensor.dtype
    assert received.shape == tensor.shape
    assert torch.equal(received, tensor)


@given(st.sampled_from(sorted(set(ITEM_BYTES) - {"bfloat16"})), shapes)
def test_numpy_and_torch_give_the_same_bytes(dtype: str, shape: list[int]) -> None:
    tensor = some_tensor(dtype, shape)
    assert from_numpy(tensor.numpy()) == from_torch(tensor)


def test_contiguous_tensors_are_not_copied() -> None:
    tensor = torch.zeros(4, dtype=torch.bfloat16)
    array = np.zeros((2, 2), np.float32)
    from_torch(tensor).data[0] = 1
    from_numpy(array).data[0] = 1
    assert tensor[0] != 0
    assert array[0, 0] != 0
    data = from_numpy(array)
    assert to_torch(data).data_ptr() == array.ctypes.data


def test_other_memory_orders_give_equal_values() -> None:
    rows = torch.arange(6, dtype=torch.uint8).reshape(2, 3)
    for tensor in (rows.T, rows[:, 0], rows[:, ::2], rows.float()[0, ::2]):
        assert torch.equal(to_torch(from_torch(tensor)), tensor)
    array = np.arange(6, dtype=">i4").reshape(2, 3)
    for other in (array, np.asfortranarray(array), array[:, ::2], array[0, ::-1]):
        assert to_torch(from_numpy(other)).tolist() == other.tolist()


def test_read_only_buffers_raise_no_warning() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_torch(TensorData("uint8", (3,), memoryview(b"abc"))).tolist() == [97, 98, 99]


@pytest.mark.parametrize(
    "tensor",
    [torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), torch.eye(2).to_mkldnn()],
    ids=["complex", "sparse", "mkldnn"],
)
def test_unsupported_dtypes_and_layouts_are_refused(tensor: Tensor) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        from_torch(tensor)


def test_numpy_objects_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        from_numpy(np.array([object()]))
