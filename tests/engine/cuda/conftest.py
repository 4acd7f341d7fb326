"""Fixtures of the GPU tests, which use Triton's interpreter on machines without a GPU."""

from importlib.util import find_spec

import pytest
import torch

# Triton is available on Linux only.
collect_ignore_glob = [] if find_spec("triton") else ["kernels/test_*.py", "test_fused_layers.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
