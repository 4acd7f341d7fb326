"""Tower: the loaded part of a multimodal model that turns media into embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from shared.errors import ConfigError
from shared.models import registry
from shared.models.tower_adapter import Fields, TowerAdapter, check_finite
from shared.vision.weights import load_weights

# Number of embeddings that are computed at once on a CPU: those of four images of 448 x 448 pixels.
# Runs of one image took as long, and make threads wait for each other more often.
CPU_RUN_LEN = 1024


@dataclass(frozen=True, slots=True)
class Tower:
    """Weights that make embeddings; a language model beside them is not used."""

    adapter: TowerAdapter
    model: PreTrainedModel

    @torch.inference_mode()
    def encode(self, batch: Sequence[Fields]) -> list[Tensor]:
        """Return the embeddings of each item, [count, width], on the tower's device.

        Raises InvalidRequest if those of an item are not finite.
        """
        embeddings = []
        for run in self._split(batch):
            embeddings += self.adapter.encode(self.model, run)
        for embedding in embeddings:
            check_finite(embedding)
        return embeddings

    def _split(self, batch: Sequence[Fields]) -> list[list[Fields]]:
        """Return the runs that go through the tower at once, in the order of the batch."""
        if self.model.device.type != "cpu":
            return [list(batch)]
        runs: list[list[Fields]] = []
        room = 0
        for fields in batch:
            count = self.adapter.count(fields)
            if count > room:
                runs.append([])
                room = CPU_RUN_LEN
            runs[-1].append(fields)
            room -= count
        return runs


def load_tower(folder: Path, dtype: torch.dtype, device: str) -> Tower:
    """Load the tower of a model folder without its language model. Raises ConfigError."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    adapter = registry.find_tower(config)
    if adapter is None:
        raise ConfigError(
            f"models.path: {folder}: a model of type {config.model_type!r} has no tower",
            field="models.path",
        )
    model_class = registry.find_model_class(config)
    model = load_weights(model_class, folder, dtype, device, adapter.language_modules)
    adapter.optimize_layers(model)
    tower = Tower(adapter, model)
    # One-time work happens now, and a tower that cannot encode fails at start.
    tower.encode([adapter.sample()])
    return tower
