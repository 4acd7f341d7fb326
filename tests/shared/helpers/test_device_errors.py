"""Errors of a lost GPU, told apart from errors of a request and from a lack of memory."""

import pytest
import torch

from shared.errors import InvalidRequest
from shared.helpers.device_errors import is_device_lost, is_out_of_memory


@pytest.mark.parametrize(
    "error",
    [
        torch.AcceleratorError("CUDA error: an illegal memory access was encountered"),
        torch.AcceleratorError("device-side assert triggered"),
        RuntimeError("CUDA error: device-side assert triggered\nCompile with TORCH_USE_CUDA_DSA"),
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasGemmEx`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_MAPPING_ERROR"),
    ],
)
def test_a_lost_device_is_found_also_as_a_cause(error: Exception) -> None:
    assert is_device_lost(error)
    wrapped, later = ValueError("not written"), RuntimeError("once more")
    wrapped.__cause__ = error
    later.__context__ = wrapped
    assert is_device_lost(later)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        torch.AcceleratorError("CUDA error: out of memory"),
        RuntimeError("Triton Error [CUDA]: out of memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    ],
)
def test_a_lack_of_memory_leaves_the_device_as_it_was(error: Exception) -> None:
    assert is_out_of_memory(error)
    assert not is_device_lost(error)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED"),
        RuntimeError("shape '[3]' is invalid for input of size 4"),
        # Texts of clients.
        InvalidRequest("CUDA error: an illegal memory access was encountered"),
        RuntimeError("the name 'CUDA error: out of memory' is too long"),
    ],
)
def test_other_errors_are_errors_of_a_request(error: Exception) -> None:
    assert not is_device_lost(error)
    assert not is_out_of_memory(error)
