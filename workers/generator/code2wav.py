"""Qwen3-Omni's vocoder, code2wav: several codebooks a frame, and a causal network.

Each transposed convolution drops samples at the end of its input. A chunk therefore needs a frame
of context after it. Only the end of a speech lacks these samples, as in transformers.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe

from shared.vision.weights import load_weights
from workers.generator.core.vocoder import Chunk
from workers.generator.neural_vocoder import NeuralVocoder

PREFIX = "code2wav"
# Value from transformers' `chunked_decode`. Earlier frames change a sample only a little.
MIN_LEFT = 25


class Qwen3OmniVocoder(NeuralVocoder):
    """The vocoder with the weights `code2wav` of a Qwen3-Omni model."""

    min_left = MIN_LEFT
    min_right = 1

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(device)
        self._model = model
        self.samples_per_frame = int(model.total_upsample)
        self.num_codebooks: int = model.config.num_quantizers
        self.num_codes: int = model.config.codebook_size
        # The number is measured with the shortest speech, which also warms up the network.
        shortest = torch.zeros((1, 1, self.num_codebooks), dtype=torch.int64, device=device)
        self.num_missing = self.samples_per_frame - self.decode(shortest, []).shape[1]

    @torch.inference_mode()
    def decode(self, codes: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        sound: Tensor = self._model(codes.transpose(1, 2))
        return sound[:, 0]


def load(folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: str) -> NeuralVocoder:
    """Load the vocoder of a model's folder. Raises ConfigError."""
    model = load_weights(
        modeling_qwen3_omni_moe.Qwen3OmniMoeCode2Wav,
        folder,
        dtype,
        device,
        part=(PREFIX, config.code2wav_config),
    )
    return Qwen3OmniVocoder(model, torch.device(device))
