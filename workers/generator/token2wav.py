"""Qwen2.5-Omni's vocoder, token2wav: a diffusion transformer makes mel frames, BigVGAN the sound.

The transformer solves an ODE that begins with noise. The noise of a mel frame is a function of the
request's seed and of the frame's index in the speech. All frames of a window influence each other,
so a chunk is equal to a part of the whole speech only if its context is the rest of the speech.
"""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni

from shared.errors import ConfigError
from shared.vision.weights import load_weights
from workers.generator.core.vocoder import Chunk
from workers.generator.neural_vocoder import NeuralVocoder

PREFIX = "token2wav"
VOICES_FILE = "speakers.safetensors"
# The settings of transformers' `token2wav`.
NUM_POINTS, GUIDANCE, SWAY = 10, 0.5, -1.0


class Voice(NamedTuple):
    condition: Tensor  # [1, enc_emb_dim]
    reference_mel: Tensor  # [1, num_mel_frames, mel_dim]


class Qwen25OmniVocoder(NeuralVocoder):
    """The vocoder with the weights `token2wav` of a Qwen2.5-Omni model."""

    num_codebooks = 1

    def __init__(self, model: Any, voices: dict[str, Voice], device: torch.device) -> None:
        super().__init__(device)
        self._dit, self._bigvgan = model.code2wav_dit_model, model.code2wav_bigvgan_model
        self._voices = voices
        dit = model.config.dit_config
        self._repeats: int = dit.repeats
        self._mel_dim: int = dit.mel_dim
        rates = model.config.bigvgan_config.upsample_rates
        self.samples_per_frame = self._repeats * int(np.prod(rates))
        self.num_codes: int = dit.num_embeds
        # Reach of one layer of the transformer. Each of the listed layers adds as much.
        block = -(-dit.block_size // self._repeats)
        self.min_left = block * len(dit.look_backward_layers)
        self.min_right = block * len(dit.look_ahead_layers)

    @torch.inference_mode()
    def decode(self, codes: Tensor, chunks: Sequence[Chunk]) -> Tensor:
        num_frames = codes.shape[1] * self._repeats
        voice = self._voices[chunks[0].speaker.voice or next(iter(self._voices))]
        rows = [self.noise(c.speaker.seed, c.position * self._repeats, num_frames) for c in chunks]
        noise = torch.from_numpy(np.stack(rows)).to(voice.reference_mel)
        mel = self._solve(noise, codes[:, :, 0], voice)
        sound: Tensor = self._bigvgan(mel.transpose(1, 2))
        return sound.reshape(len(chunks), -1)

    def noise(self, seed: int, first: int, num_frames: int) -> NDArray[np.float64]:
        """Return normal numbers for mel frames from index `first` on, [num_frames, mel_dim]."""
        frames = range(first, first + num_frames)
        streams = (
            np.random.Generator(np.random.Philox(key=[seed, 0], counter=[0, 0, 0, i]))
            for i in frames
        )
        return np.stack([stream.standard_normal(self._mel_dim) for stream in streams])

    def _solve(self, noise: Tensor, codes: Tensor, voice: Voice) -> Tensor:
        """Solve the ODE from noise to mel frames, [num_chunks, num_mel_frames, mel_dim]."""
        num_chunks, num_frames, _ = noise.shape
        condition = voice.condition[:, None].expand(num_chunks, num_frames, -1)
        reference_mel = voice.reference_mel.expand(num_chunks, -1, -1)

        def velocity(time: Tensor, mel: Tensor) -> Tensor:
            both: Tensor = self._dit(
                hidden_states=mel,
                condition_vector=reference_mel,
                speaker_embedding=condition,
                quantized_code=codes,
                time_step=time,
            )
            guided, unguided = both.chunk(2)
            return guided + (guided - unguided) * GUIDANCE

        times = torch.linspace(0, 1, NUM_POINTS, dtype=noise.dtype, device=noise.device)
        times = times + SWAY * (torch.cos(torch.pi / 2 * times) - 1 + times)
        solver = modeling_qwen2_5_omni.RungeKutta4ODESolver(velocity, noise)
        mel = noise
        # `integrate` compares times on the device, and the host would wait for each comparison.
        for start, end in pairwise(times):
            mel = mel + solver._rk4_step(velocity, start, end - start, end, mel)
        return mel


def load(
    folder: Path, config: PreTrainedConfig, voices: Sequence[str], dtype: torch.dtype, device: str
) -> NeuralVocoder:
    """Load the vocoder of a model's folder. Raises ConfigError."""
    model = load_weights(
        modeling_qwen2_5_omni.Qwen2_5OmniToken2WavModel,
        folder,
        dtype,
        device,
        part=(PREFIX, config.token2wav_config),
    )
    file = folder / VOICES_FILE
    try:
        tensors = load_file(file, device)
        voice_by_name = {
            voice: Voice(tensors[f"{voice}.cond"].to(dtype), tensors[f"{voice}.ref_mel"].to(dtype))
            for voice in voices
        }
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{file}: not a safetensors file: {error}") from error
    except KeyError as error:
        raise ConfigError(f"{file}: there is no array {error}") from error
    if not voice_by_name:
        raise ConfigError(f"{folder}: the stage needs the names of its voices")
    return Qwen25OmniVocoder(model, voice_by_name, torch.device(device))
