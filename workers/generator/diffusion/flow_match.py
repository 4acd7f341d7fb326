"""Flow matching by Euler's method, as `FlowMatchEulerDiscreteScheduler` of diffusers does it."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import InvalidRequest
from workers.generator.core.denoising import Step, Stepped
from workers.generator.diffusion.transfers import State, download

Levels = NDArray[np.float32]
"""Noise levels of the steps of an image, [steps]."""


class Schedule(NamedTuple):
    """Noise levels of an image."""

    sigmas: Tensor
    """float32 [steps + 1]; the last one is 0."""
    times: Tensor
    """float32 [steps]"""


class FlowMatch:
    """Steps of a scheduler for images that are at different steps."""

    def __init__(self, scheduler: Any, make_levels: Callable[[int], Levels | None]) -> None:
        """`make_levels` returns the levels of a number of steps, as `make_schedule` reads them."""
        self._scheduler, self._make_levels = scheduler, make_levels
        self._schedule = lru_cache(256)(self._make_schedule)

    def times(self, steps: Sequence[Step], num_patches: int) -> Tensor:
        """Return the times of images with this number of patches, float32 [images].

        Raises InvalidRequest for a number of steps that the scheduler does not have.
        """
        schedules = [self._schedule(step.steps, num_patches) for step in steps]
        return torch.stack(
            [schedule.times[step.number] for step, schedule in zip(steps, schedules, strict=True)]
        )

    def move(
        self,
        steps: Sequence[Step],
        num_patches: int,
        images: Sequence[Tensor],
        velocities: Sequence[Tensor],
    ) -> list[Stepped]:
        """Return the images after their steps. All images have the same shape."""
        moved, finished = zip(
            *(
                _move(
                    image, velocity, self._schedule(step.steps, num_patches).sigmas[step.number :]
                )
                for step, image, velocity in zip(steps, images, velocities, strict=True)
            ),
            strict=True,
        )
        return download([State(latents, {}) for latents in moved], finished)

    def _make_schedule(self, steps: int, num_patches: int) -> Schedule:
        shift = shift_of(self._scheduler, num_patches)
        # A scheduler that ends above 0 stretches the levels between the first and the last step.
        with np.errstate(invalid="ignore"):
            schedule = make_schedule(self._scheduler, steps, shift, self._make_levels(steps))
        if not schedule.sigmas.isfinite().all():
            raise InvalidRequest(
                f"image.steps: {steps} is too few for this model's scheduler", field="image.steps"
            )
        return schedule


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError if a scheduler is stochastic, or has settings without finite levels."""
    config = scheduler.config
    if config.stochastic_sampling:
        raise ValueError("stochastic_sampling is not supported")
    if config.base_image_seq_len == config.max_image_seq_len:
        raise ValueError("base_image_seq_len and max_image_seq_len must be different")
    check_levels(make_schedule(scheduler, 2, shift_of(scheduler, 1), linear_levels(2)))


def check_levels(schedule: Schedule) -> None:
    """Raise ValueError if a schedule has numbers that are not finite."""
    if not (schedule.sigmas.isfinite().all() and schedule.times.isfinite().all()):
        raise ValueError("the settings lead to noise levels that are not finite")


def linear_levels(steps: int) -> Levels:
    """Return levels at equal distances from 1 to 1 / `steps`."""
    return np.linspace(1.0, 1 / steps, steps, dtype=np.float32)


def make_schedule(scheduler: Any, steps: int, shift: float, levels: Levels | None) -> Schedule:
    """Return the noise levels of `steps` steps.

    `levels` are the levels before the scheduler moves them, and by default its usual ones. `shift`
    is the `mu` of a scheduler with dynamic shifts; others have no use for it.
    """
    # A scheduler counts its steps, so this one is used for its tables alone.
    tables = FlowMatchEulerDiscreteScheduler.from_config(scheduler.config)
    tables.set_timesteps(steps, sigmas=levels, mu=shift)
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


def _move(latents: Tensor, velocity: Tensor, sigmas: Tensor) -> tuple[Tensor, Tensor]:
    """Return an image at the second of `sigmas`, and as it would be finished.

    Its latents are at the first of `sigmas`.

    As in the scheduler, latents are rounded to float32 before a step.
    """
    sample = latents.to(torch.float32)
    moved = (sample + (sigmas[1] - sigmas[0]) * velocity).to(velocity.dtype)
    finished = (sample - sigmas[0] * velocity).to(velocity.dtype)
    return moved, finished
