"""Errors after which a process can compute nothing more on its GPU.

After an illegal access, every later call of the CUDA context fails, so the process has to end. The
errors are found by their types and texts, because pure packages do not import torch.
"""

import re

# Only the beginning of a text counts: the rest may quote a client.
_LOST = re.compile(
    r"CUDA error: (?!CUBLAS_)|CUDA driver error: |Triton Error \[CUDA\]: "
    r"|(?:CUDA|cuDNN) error: CU(?:BLAS|DNN)_STATUS_"
    r"(?:NOT_INITIALIZED|MAPPING_ERROR|EXECUTION_FAILED|INTERNAL_ERROR)\b"
)
# An allocation that fails leaves the context as it was.
_NO_MEMORY = re.compile(r"out of memory", re.IGNORECASE)


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


def _is_lost(error: BaseException) -> bool:
    text = str(error)
    if not isinstance(error, RuntimeError) or _NO_MEMORY.search(text):
        return False
    return type(error).__name__ == "AcceleratorError" or _LOST.match(text) is not None
