"""Errors of a GPU: it is lost for this process, or its memory has run out.

After an illegal access, every later call of the CUDA context fails, so the process has to end. An
allocation that fails leaves the context as it was. The errors are found by their types and texts,
because pure packages do not import torch.
"""

import re

# Only the beginning of a text counts: the rest may quote a client.
_LOST = re.compile(
    r"CUDA error: (?!CUBLAS_)|CUDA driver error: |Triton Error \[CUDA\]: "
    r"|(?:CUDA|cuDNN) error: CU(?:BLAS|DNN)_STATUS_"
    r"(?:NOT_INITIALIZED|MAPPING_ERROR|EXECUTION_FAILED|INTERNAL_ERROR)\b"
)
_NO_MEMORY = re.compile(
    r"(?:CUDA error|CUDA driver error|Triton Error \[CUDA\]): out of memory"
    r"|(?:CUDA|cuDNN) error: CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED\b"
)


def is_device_lost(error: BaseException) -> bool:
    """Return whether this error, or one that led to it, comes from a device that is lost.

    False for memory that has run out, and for an operation that a library does not support.
    """
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in causes:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    return any(map(_is_lost, causes))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether the memory of a GPU or of this process has run out."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and _NO_MEMORY.match(str(error)) is not None


def _is_lost(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    return type(error).__name__ == "AcceleratorError" or _LOST.match(str(error)) is not None
