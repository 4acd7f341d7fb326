"""DPM-Solver++ with one or two steps, as `DPMSolverMultistepScheduler` of diffusers does it.

A step is a function of the image, the schedule and the number of the step. The second order needs
the finished image as the step before predicted it, which is part of an image's progress.
"""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from diffusers import DPMSolverMultistepScheduler
from torch import Tensor

from shared.codec.tensors import from_torch
from workers.generator.core.denoising import Progress, Step, Stepped
from workers.generator.diffusion.flow_match import Schedule, check_levels
from workers.generator.diffusion.transfers import State, download

PREVIOUS = "previous"
"""Name of the finished image that the step before predicted, of the latents' shape and dtype."""
SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "algorithm_type": ("dpmsolver++",),
    "solver_order": (1, 2),
    "solver_type": ("midpoint", "heun"),
    "prediction_type": ("epsilon", "v_prediction", "flow_prediction"),
    "thresholding": (False,),
    "use_dynamic_shifting": (False,),
    "variance_type": (None,),
}
# Shorter schedules have a last step of the first order, if the setting says so.
NUM_LONG = 15


class _Level(NamedTuple):
    """Parts of the image and of the noise in latents, and the logarithm of their ratio."""

    alpha: Tensor
    sigma: Tensor
    log_ratio: Tensor


class DpmSolver:
    """Steps of a scheduler for images that are at different steps."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self._schedule = lru_cache(256)(lambda steps: make_schedule(scheduler, steps))

    def times(self, steps: Sequence[Step]) -> Tensor:
        """Return the times of images, int64 [images]."""
        return torch.stack([self._schedule(step.steps).times[step.number] for step in steps])

    def move(
        self, steps: Sequence[Step], states: Sequence[State], predictions: Sequence[Tensor]
    ) -> list[Stepped]:
        """Return the images after their steps; `predictions` have the shape of the latents."""
        config = self._scheduler.config
        moved = [
            move(config, self._schedule(step.steps), step.number, state, predicted)
            for step, state, predicted in zip(steps, states, predictions, strict=True)
        ]
        return download(moved, [state.solver[PREVIOUS] for state in moved])


def check_scheduler(scheduler: Any) -> None:
    """Raise ValueError for another algorithm, and for settings without finite noise levels."""
    for name, values in SUPPORTED.items():
        value = scheduler.config[name]
        if value not in values:
            supported = ", ".join(repr(value) for value in values)
            raise ValueError(f"{name} {value!r} is not supported; supported: {supported}")
    check_levels(make_schedule(scheduler, 2))


def make_schedule(scheduler: Any, steps: int) -> Schedule:
    """Return the noise levels and times of `steps` steps."""
    # A scheduler counts its steps, so this one is used for its tables alone.
    tables = DPMSolverMultistepScheduler.from_config(scheduler.config)
    tables.set_timesteps(steps)
    return Schedule(tables.sigmas, tables.timesteps)


def begin(latents: Tensor) -> Progress:
    """Return an image before its first step."""
    return Progress(from_torch(latents), {PREVIOUS: from_torch(torch.zeros_like(latents))})


def move(
    config: Mapping[str, Any], schedule: Schedule, number: int, state: State, predicted: Tensor
) -> State:
    """Return an image after one more step; it has `number` steps.

    `config` are the settings of the scheduler, and `predicted` is the network's output in the shape
    of the latents. As in the scheduler, latents are rounded to float32 before a step.
    """
    latents = state.latents
    now, then = (_level_of(schedule.sigmas[n], config) for n in (number, number + 1))
    finished = _finished(config, now, latents, predicted)
    sample = latents.to(torch.float32)
    change = then.log_ratio - now.log_ratio
    shrinkage = torch.exp(-change) - 1.0
    moved = (then.sigma / now.sigma) * sample - (then.alpha * shrinkage) * finished
    if _is_second_order(config, number, len(schedule.times)):
        before = _level_of(schedule.sigmas[number - 1], config)
        ratio = (now.log_ratio - before.log_ratio) / change
        slope = (1.0 / ratio) * (finished - state.solver[PREVIOUS])
        if config["solver_type"] == "midpoint":
            moved = moved - 0.5 * (then.alpha * shrinkage) * slope
        else:
            moved = moved + (then.alpha * (shrinkage / change + 1.0)) * slope
    return State(moved.to(finished.dtype), {PREVIOUS: finished})


def _is_second_order(config: Mapping[str, Any], number: int, steps: int) -> bool:
    has_simple_end = (
        config["euler_at_final"]
        or (config["lower_order_final"] and steps < NUM_LONG)
        or config["final_sigmas_type"] == "zero"
    )
    is_simple_end = number == steps - 1 and has_simple_end
    return config["solver_order"] > 1 and number > 0 and not is_simple_end


def _level_of(sigma: Tensor, config: Mapping[str, Any]) -> _Level:
    if config["use_flow_sigmas"]:
        alpha = 1 - sigma
    else:
        alpha = 1 / ((sigma**2 + 1) ** 0.5)
        sigma = sigma * alpha
    return _Level(alpha, sigma, torch.log(alpha) - torch.log(sigma))


def _finished(
    config: Mapping[str, Any], level: _Level, latents: Tensor, predicted: Tensor
) -> Tensor:
    """Return the finished image that a prediction stands for, in the dtype of the prediction."""
    match config["prediction_type"]:
        case "epsilon":
            return (latents - level.sigma * predicted) / level.alpha
        case "v_prediction":
            return level.alpha * latents - level.sigma * predicted
        case _:
            return latents - level.sigma * predicted
