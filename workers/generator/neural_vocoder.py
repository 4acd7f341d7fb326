"""Vocoders with neural networks: parts of a model that run transformers' modules."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from workers.generator.core.vocoder import Chunk, Codes, Samples

SAMPLE_RATE = 24_000
GPU_ROWS = 64


class NeuralVocoder(ABC):
    """Computes the whole window of a chunk, and returns only the samples of the chunk's frames."""

    sample_rate = SAMPLE_RATE
    samples_per_frame: int
    num_codebooks: int
    num_codes: int
    min_left: int
    min_right: int
    num_missing = 0

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # The last bits of a result depend on the other chunks in its batch. On a CPU, batches save
        # little time. One row at a time gives a chunk the same samples in every attempt.
        self.max_rows = 1 if device.type == "cpu" else GPU_ROWS

    def carry(self, codes: Codes, position: int) -> int:
        return 0

    @torch.inference_mode()
    def synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        samples: list[Samples] = []
        for start in range(0, len(chunks), self.max_rows):
            samples += self._synthesize(chunks[start : start + self.max_rows])
        return samples

    def _synthesize(self, chunks: Sequence[Chunk]) -> list[Samples]:
        codes: NDArray[Any] = np.stack([chunk.codes for chunk in chunks]).astype(np.int64)
        sound = self.decode(torch.from_numpy(codes).to(self._device), chunks)
        left, stop = chunks[0].left, codes.shape[1] - chunks[0].right
        own = sound[:, left * self.samples_per_frame : stop * self.samples_per_frame]
        full_scale = own.double().cpu().numpy() * 32767
        return list(np.clip(np.rint(full_scale), -32768, 32767).astype(np.int16))

    @abstractmethod
    def decode(self, codes: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        """Return the sound of whole windows: [n, num_frames, num_codebooks] -> [n, num_samples]."""
