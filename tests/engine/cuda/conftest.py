"""Kernels run on the GPU where there is one, and else in Triton's interpreter."""

from importlib.util import find_spec

import pytest
import torch

# There is none for other systems than Linux.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")
