"""Flow matching by Euler's method, as `FlowMatchEulerDiscreteScheduler` of diffusers does it."""

from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from torch import Tensor

from shared.codec.tensors import from_torch
from workers.generator.core.denoising import Progress, Stepped


class Schedule(NamedTuple):
    """Noise levels of an image."""

    sigmas: Tensor
    """float32 [steps + 1]; the last one is 0."""
    times: Tensor
    """float32 [steps]"""


def make_schedule(
    scheduler: Any,
    steps: int,
    shift: float | None,
    levels: NDArray[np.float32] | None = None,
) -> Schedule:
    """Return the noise levels of `steps` steps from 1 to 1 / `steps`, which `shift` moves.

    `shift` is the `mu` of the scheduler; None for one without dynamic shifts. `levels` are the
    levels before the shift, [steps]; by default they have equal distances.
    """
    if levels is None:
        levels = np.linspace(1.0, 1 / steps, steps, dtype=np.float32)
    # A scheduler counts its steps, so this one is used for its tables alone.
    tables = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    tables.set_timesteps(sigmas=levels, mu=shift)
    return Schedule(tables.sigmas, tables.timesteps)


def shift_of(scheduler: Any, num_patches: int) -> float:
    """Return the shift for an image with this number of patches."""
    config = scheduler.config
    first = config.get("base_image_seq_len", 256)
    slope = (config.get("max_shift", 1.15) - config.get("base_shift", 0.5)) / (
        config.get("max_image_seq_len", 4096) - first
    )
    shift: float = num_patches * slope + (config.get("base_shift", 0.5) - slope * first)
    return shift


def stepped(latents: Tensor, velocity: Tensor, sigmas: Tensor) -> Stepped:
    """Return an image at the second of `sigmas`; its latents are at the first.

    As in the scheduler, latents are rounded to float32 before a step.
    """
    sample = latents.to(torch.float32)
    moved = (sample + (sigmas[1] - sigmas[0]) * velocity).to(velocity.dtype)
    finished = (sample - sigmas[0] * velocity).to(velocity.dtype)
    return Stepped(Progress(from_torch(moved), {}), from_torch(finished))
