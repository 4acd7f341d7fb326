"""Wan, one step at a time: each row of a batch may be at another step.

The operations have the order of `WanPipeline`, so that the videos are the same.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from diffusers import AutoencoderKLWan, WanTransformer3DModel
from diffusers.pipelines.wan.pipeline_wan import prompt_clean
from torch import Tensor
from transformers.models.t5.tokenization_t5 import T5Tokenizer
from transformers.models.umt5 import UMT5EncoderModel

from shared.codec.envelope import TensorData
from shared.codec.tensors import from_torch, to_torch
from shared.errors import ConfigError
from shared.models.image_folder import MODEL_INDEX, ImageFolder
from workers.generator.core.denoising import (
    Condition,
    Noise,
    Progress,
    Size,
    Step,
    Stepped,
    check_num_tokens,
    check_sizes,
)
from workers.generator.diffusion.latents import DiffusersModel
from workers.generator.diffusion.parts import PartLoader, refusing
from workers.generator.diffusion.pixels import denormalized, to_unit
from workers.generator.diffusion.transfers import download, upload, upload_states
from workers.generator.diffusion.uni_pc import Schedule, begin, load_scheduler, make_schedule, move

PATCH = 2
"""Side of a patch in latents."""
PAD = 0
"""Id of the padding. The network reads zeros in place of its states."""
# 1920x1088 pixels. With the limit on frames, it bounds the memory for one video.
MAX_PATCHES = 8_160


class Wan(DiffusersModel):
    """The networks of Wan with their tokenizer and scheduler.

    Latents are float32 [channels, frames, rows, columns]. Except for the first frame, each frame of
    latents is several frames of the video.
    """

    min_guidance = no_guidance = 1.0

    def __init__(
        self,
        folder: ImageFolder,
        tokenizer: Any,
        text_encoder: Any,
        transformers: Sequence[Any],
        vae: Any,
        scheduler: Any,
    ) -> None:
        """The second of the `transformers`, if there is one, computes the steps with less noise."""
        self.empty_negative = folder.family.empty_negative
        self._max_tokens = folder.family.max_prompt_tokens
        self._tokenizer, self._text_encoder = tokenizer, text_encoder
        self._transformers, self._vae = transformers, vae
        self._schedule: Callable[[int], Schedule] = lru_cache(256)(
            lambda steps: make_schedule(scheduler, steps)
        )
        self._expands_times = bool(folder.settings.get("expand_timesteps"))
        ratio = folder.settings.get("boundary_ratio")
        self._boundary = None if ratio is None else ratio * scheduler.config.num_train_timesteps

    def check_text(self, text: str, field: str) -> int:
        return check_num_tokens(len(self._tokenize(text)), self._max_tokens, field)

    def video_shape(self, size: Size, frames: int) -> tuple[int, int, int, int]:
        config, (width, height) = self._vae.config, size
        side, length = config.scale_factor_spatial, config.scale_factor_temporal
        return config.z_dim, (frames - 1) // length + 1, height // side, width // side

    def begin(self, size: Size, noise: Noise) -> Progress:
        latents = torch.from_numpy(noise).to(torch.float32)
        return begin(latents, self._transformers[0].dtype)

    @torch.inference_mode()
    def step(self, steps: Sequence[Step]) -> list[Stepped]:
        schedules = [self._schedule(step.steps) for step in steps]
        times = [
            schedule.times[step.number] for step, schedule in zip(steps, schedules, strict=True)
        ]
        rows_of: dict[int, list[int]] = {}
        for row, time in enumerate(times):
            rows_of.setdefault(self._transformer_at(time), []).append(row)
        states = upload_states(steps, self._transformers[0].device)
        velocities: dict[int, Tensor] = {}
        for number, rows in rows_of.items():
            predicted = self._predict(
                self._transformers[number],
                [steps[row] for row in rows],
                [states[row].latents for row in rows],
                [times[row] for row in rows],
            )
            velocities |= zip(rows, predicted, strict=True)
        moved, finished = zip(
            *(
                move(states[row], velocities[row], schedules[row].sigmas, step.number)
                for row, step in enumerate(steps)
            ),
            strict=True,
        )
        return download(moved, finished)

    @torch.inference_mode()
    def decode(self, latents: TensorData, size: Size) -> Tensor:
        video = to_torch(latents)[None].to(self._vae.device, self._vae.dtype)
        video = denormalized(video, self._vae.config)
        # The decoder computes the frames of latents one after another.
        decoded: Tensor = self._vae.decode(video, return_dict=False)[0][0]
        return to_unit(decoded, self._transformers[0].dtype)

    def _tokenize(self, text: str) -> list[int]:
        token_ids: list[int] = self._tokenizer.encode(prompt_clean(text)).ids
        return token_ids

    def _encode(self, text: str) -> Condition:
        """Encode a text. The encoder reads padding after it, as in the pipeline."""
        token_ids = self._tokenize(text)
        num_tokens, num_pads = len(token_ids), self._max_tokens - len(token_ids)
        device = self._text_encoder.device
        states = self._text_encoder(
            torch.tensor([token_ids + [PAD] * num_pads], device=device),
            torch.tensor([[1] * num_tokens + [0] * num_pads], device=device),
        ).last_hidden_state
        return Condition({"prompt": from_torch(states[0, :num_tokens])}, num_tokens)

    def _transformer_at(self, time: Tensor) -> int:
        return int(self._boundary is not None and bool(time < self._boundary))

    def _predict(
        self,
        transformer: Any,
        steps: Sequence[Step],
        videos: Sequence[Tensor],
        times: Sequence[Tensor],
    ) -> list[Tensor]:
        """Return the velocity of each video, which has the shape of its latents."""
        velocities = self._velocities(transformer, videos, times, [step.prompt for step in steps])
        # As in the pipeline, texts to guide away from have a second call.
        guided = {n: step.negative for n, step in enumerate(steps) if step.negative is not None}
        if guided:
            negatives = self._velocities(
                transformer,
                [videos[n] for n in guided],
                [times[n] for n in guided],
                list(guided.values()),
            )
            for n, negative in zip(guided, negatives, strict=True):
                velocities[n] = negative + steps[n].guidance * (velocities[n] - negative)
        return velocities

    def _velocities(
        self,
        transformer: Any,
        videos: Sequence[Tensor],
        times: Sequence[Tensor],
        texts: Sequence[Condition],
    ) -> list[Tensor]:
        prompts = upload([text.arrays["prompt"] for text in texts], transformer.device)
        padded = prompts[0].new_zeros(len(prompts), self._max_tokens, prompts[0].shape[-1])
        for row, prompt in zip(padded, prompts, strict=True):
            row[: len(prompt)] = prompt
        stacked = torch.stack(list(videos))
        timesteps = torch.stack(list(times)).to(transformer.device)
        if self._expands_times:
            # Each patch has a time, which differs only for videos that begin with an image.
            timesteps = timesteps[:, None].expand(-1, stacked[0, 0].numel() // PATCH**2)
        predicted = transformer(
            hidden_states=stacked.to(transformer.dtype),
            timestep=timesteps,
            encoder_hidden_states=padded.to(transformer.dtype),
            return_dict=False,
        )[0]
        return list(predicted)


def load(
    folder: ImageFolder,
    dtype: str,
    device: str,
    sizes: Sequence[str],
    key: str,
    report: Callable[[str], None],
) -> Wan:
    """Load the parts of a folder for these sizes; `report` is called before each of them.

    Raises ConfigError.
    """
    if folder.settings.get("boundary_ratio") and "transformer_2" not in folder.parts:
        raise ConfigError(
            f"models.path: {folder.folder}: the boundary_ratio of {MODEL_INDEX} requires a"
            " transformer_2",
            field="models.path",
        )
    parts = PartLoader(folder, dtype, device, report)
    with refusing(folder.folder / "scheduler"):
        scheduler = load_scheduler(folder.folder / "scheduler")
    tokenizer = parts.load_tokenizer(T5Tokenizer, "tokenizer")
    # The smallest part is first: its settings decide which sizes there are.
    vae = parts.load_network(AutoencoderKLWan, "vae")
    check_sizes(sizes, PATCH * vae.config.scale_factor_spatial, MAX_PATCHES, key)
    text_encoder = parts.load_text_encoder(UMT5EncoderModel, "text_encoder")
    transformers = [
        parts.load_network(WanTransformer3DModel, name)
        for name in ("transformer", "transformer_2")
        if name in folder.parts
    ]
    return Wan(folder, tokenizer, text_encoder, transformers, vae, scheduler)
