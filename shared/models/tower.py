"""Tower: the loaded part of a multimodal model that converts media to embeddings."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from shared.errors import ConfigError
from shared.models import registry
from shared.models.dtypes import choose_dtype, saved_dtype
from shared.models.tower_adapter import Fields, TowerAdapter, check_finite
from shared.native.choices import KernelSetting
from shared.vision.weights import load_weights

# Number of embeddings that are computed at once on a CPU, enough for four images of 448 x 448
# pixels. Runs of one image take the same time, but threads wait for each other more often.
CPU_RUN_LEN = 1024
# On a GPU, enough for a batch of the largest images. Longer runs of videos would need more memory.
GPU_RUN_LEN = 16_384
# Videos are split into parts of at most this many embeddings, and the parts are grouped into runs.
MAX_SPLIT_LEN = 1024


@dataclass(frozen=True, slots=True)
class Tower:
    """Weights that compute embeddings. If the model also has a language model, it is not used."""

    adapter: TowerAdapter
    model: PreTrainedModel
    _lock: Lock = field(default_factory=Lock)
    """Held by the thread that encodes. An engine's step may encode next to its tower thread."""

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    @torch.inference_mode()
    def encode(self, batch: Sequence[Fields]) -> list[Tensor]:
        """Return the embeddings of each item, [count, width], on the tower's device.

        Raises InvalidRequest if the embeddings of an item are not finite.
        """
        with self._lock:
            return self._encode(batch)

    def _encode(self, batch: Sequence[Fields]) -> list[Tensor]:
        split = [self.adapter.split(fields, MAX_SPLIT_LEN) for fields in batch]
        parts: list[Tensor] = []
        for run in self._split([part for item in split for part in item]):
            parts += self.adapter.encode(self.model, run)
        embeddings = []
        for fields, item in zip(batch, split, strict=True):
            own, parts = parts[: len(item)], parts[len(item) :]
            # A view would keep the output of a whole run in memory for as long as one item.
            embeddings.append(self.adapter.join(fields, own).clone())
        check_finite(*embeddings)
        return embeddings

    def _split(self, batch: Sequence[Fields]) -> list[list[Fields]]:
        """Return the runs that go through the tower at once, in the order of the batch."""
        run_len = CPU_RUN_LEN if self.device.type == "cpu" else GPU_RUN_LEN
        runs: list[list[Fields]] = []
        room = 0
        for fields in batch:
            count = self.adapter.count(fields)
            if count > room:
                runs.append([])
                room = run_len
            runs[-1].append(fields)
            room -= count
        return runs


def dtype_of_folder(folder: Path, dtype: str, device: str) -> torch.dtype:
    """Return the type in which a folder is served; `dtype` and `device` are settings."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    served: torch.dtype = getattr(torch, choose_dtype(dtype, saved_dtype(config), device))
    return served


def load_tower(
    folder: Path, dtype: torch.dtype, device: str, kernels: KernelSetting = "measured"
) -> Tower:
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
    adapter.optimize_layers(model, kernels)
    tower = Tower(adapter, model)
    # The warm-up does one-time work, and a tower that cannot encode fails at start.
    tower.encode(adapter.samples())
    return tower
