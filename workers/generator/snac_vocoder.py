"""SNAC, the codec of Orpheus: three codebooks at rates of 1, 2 and 4 codes a frame, convolutions.

A frame has its codes in the order of Orpheus: one of the first codebook, then twice one of the
second and two of the third. The network is symmetric in time and reaches less than three frames to
each side, so a chunk with this context is equal to a part of the whole sound.

The network adds noise to its states. The noise of a frame is a function of the request's seed, of
the block of the network, and of the frame's index in the speech.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from shared.errors import ConfigError
from workers.generator.core.vocoder import Chunk
from workers.generator.neural_vocoder import NeuralVocoder

STRIDES = [4, 2, 1]
"""Strides of the codebooks of models with one frame of seven codes."""
PLACES = ((0,), (1, 4), (2, 3, 5, 6))
"""Places of the codes of each codebook in a frame."""
WEIGHTS = "pytorch_model.bin"
SAFE_WEIGHTS = "model.safetensors"


class SnacVocoder(NeuralVocoder):
    """The decoder of a SNAC model."""

    num_codebooks = 7
    min_left = 3
    min_right = 3

    def __init__(self, model: Any, device: torch.device) -> None:
        super().__init__(device)
        self._model = model
        self.sample_rate = int(model.sampling_rate)
        self.num_codes = int(model.codebook_size)
        self.samples_per_frame = STRIDES[0] * int(model.hop_length)
        self._noise_blocks: list[FrameNoise] = []
        for block in model.decoder.model:
            for number, layer in enumerate(getattr(block, "block", ())):
                if type(layer).__name__ == "NoiseBlock":
                    noise = FrameNoise(layer.linear, len(self._noise_blocks))
                    block.block[number] = noise
                    self._noise_blocks.append(noise)

    @torch.inference_mode()
    def decode(self, codes: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        for block in self._noise_blocks:
            block.chunks, block.num_frames = chunks, codes.shape[1]
        by_codebook = [codes[:, :, list(places)].flatten(1) for places in PLACES]
        sound: Tensor = self._model.decode(by_codebook)
        return sound[:, 0]


class FrameNoise(nn.Module):
    """A block of the network that adds noise, which differs in each call of the package."""

    chunks: Sequence[Chunk] = ()
    """Chunks of the current batch."""
    num_frames = 0
    """Frames of each of them, with their context."""

    def __init__(self, linear: nn.Module, number: int) -> None:
        super().__init__()
        self.linear = linear
        self._number = number

    def forward(self, states: Tensor) -> Tensor:
        """Add noise to states [num_chunks, num_channels, num_steps]."""
        length = states.shape[-1] // self.num_frames
        rows = [
            noise_of(chunk.speaker.seed, self._number, chunk.position, self.num_frames, length)
            for chunk in self.chunks
        ]
        noise = torch.from_numpy(np.stack(rows)).to(states)[:, None]
        result: Tensor = states + noise * self.linear(states)
        return result


def noise_of(seed: int, block: int, first: int, num_frames: int, length: int) -> Any:
    """Return normal numbers for frames from index `first` on, `length` for each: float64."""
    streams = (
        np.random.Generator(np.random.Philox(key=[seed, block], counter=[0, 0, 0, frame]))
        for frame in range(first, first + num_frames)
    )
    return np.concatenate([stream.standard_normal(length) for stream in streams])


def is_snac(folder: Path) -> bool:
    """Return whether a folder has a SNAC model: a config.json with the strides of codebooks."""
    try:
        return "vq_strides" in json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def load(folder: Path, dtype: torch.dtype, device: str) -> NeuralVocoder:
    """Load the vocoder of a folder. Raises ConfigError."""
    try:
        from snac import SNAC
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{folder}: a SNAC vocoder requires the extra `snac`: pip install 'pagemill[snac]'"
        ) from error
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if config["vq_strides"] != STRIDES:
        raise ConfigError(
            f"{folder}: vq_strides are {config['vq_strides']}, and only {STRIDES} is supported"
        )
    if config.get("attn_window_size") is not None:
        raise ConfigError(f"{folder}: attn_window_size: attention is not supported")
    model = SNAC(**config)
    model.load_state_dict(_read_weights(folder))
    # Half precision is audible, and the network is small.
    precise = dtype if dtype == torch.float64 else torch.float32
    return SnacVocoder(model.to(device, precise).eval(), torch.device(device))


def _read_weights(folder: Path) -> dict[str, Tensor]:
    safe, other = folder / SAFE_WEIGHTS, folder / WEIGHTS
    if safe.is_file():
        return load_file(safe)
    if not other.is_file():
        raise ConfigError(f"{folder} has neither {SAFE_WEIGHTS} nor {WEIGHTS}")
    # The file may hold tensors only, so it runs no code.
    weights: dict[str, Tensor] = torch.load(other, map_location="cpu", weights_only=True)
    return weights
