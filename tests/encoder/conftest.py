import pytest
import torch

from shared.models.tower import Tower, load_tower
from workers.settings import DEMO_MODEL


@pytest.fixture(scope="session")
def demo_tower() -> Tower:
    return load_tower(DEMO_MODEL, torch.float32, "cpu")
