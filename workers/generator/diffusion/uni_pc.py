"""Flow matching by UniPC of order 2, as `UniPCMultistepScheduler` of diffusers does it.

A step first corrects its latents by the new prediction, and then predicts the latents of the next
noise level. Both use the finished latents that earlier steps have predicted.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from diffusers import UniPCMultistepScheduler
from torch import Tensor

from shared.codec.tensors import from_torch
from workers.generator.core.denoising import Progress
from workers.generator.diffusion.transfers import State

ORDER = 2
SETTINGS = {
    "solver_order": ORDER,
    "solver_type": "bh2",
    "prediction_type": "flow_prediction",
    "use_flow_sigmas": True,
    "predict_x0": True,
    "lower_order_final": True,
    "final_sigmas_type": "zero",
    "disable_corrector": [],
    "solver_p": None,
    "thresholding": False,
    "use_dynamic_shifting": False,
}
"""Settings of the scheduler with the only value that is supported."""
SAMPLE, FINISHED, FINISHED_BEFORE = "sample", "finished", "finished_before"
"""Names of the solver's tensors: the corrected latents of the last step, and the finished latents
that the last two steps have predicted."""


class Schedule(NamedTuple):
    """Noise levels of a sample."""

    sigmas: Tensor
    """float32 [steps + 1]; the last one is 0."""
    times: Tensor
    """int64 [steps]"""


def load_scheduler(folder: Any) -> Any:
    """Load the scheduler in a folder. Raises ValueError for settings that are not supported."""
    scheduler = UniPCMultistepScheduler.from_pretrained(folder, local_files_only=True)
    for name, value in SETTINGS.items():
        if (stated := scheduler.config.get(name)) != value:
            raise ValueError(f"{name}: {stated!r} is not supported, only {value!r}")
    return scheduler


def make_schedule(scheduler: Any, steps: int) -> Schedule:
    # A scheduler counts its steps, so this one is used for its tables alone.
    tables = UniPCMultistepScheduler.from_config(scheduler.config)
    tables.set_timesteps(steps)
    return Schedule(tables.sigmas, tables.timesteps)


def begin(latents: Tensor, dtype: torch.dtype) -> Progress:
    """Return a sample before its first step; `dtype` is the type of the network."""
    finished = torch.zeros_like(latents, dtype=torch.promote_types(latents.dtype, dtype))
    solver = {SAMPLE: torch.zeros_like(latents), FINISHED: finished, FINISHED_BEFORE: finished}
    return Progress(
        from_torch(latents), {name: from_torch(value) for name, value in solver.items()}
    )


def move(state: State, velocity: Tensor, sigmas: Tensor, number: int) -> tuple[State, Tensor]:
    """Return a sample after step `number`, from 0, and as it would be finished.

    The `velocity` is predicted at the noise level of the step.

    It is a function of the arguments alone, so that another worker can continue a stored sample.
    """
    steps, (latents, solver) = len(sigmas) - 1, state
    finished = latents - sigmas[number] * velocity
    before = [solver[FINISHED], solver[FINISHED_BEFORE]]
    sample = latents
    if number:
        last_order = _order_of(number - 1, steps)
        sample = _corrected(solver[SAMPLE], finished, before[:last_order], sigmas, number)
    latest = [finished, *before][: _order_of(number, steps)]
    moved = _predicted(sample, latest, sigmas, number)
    after = {SAMPLE: sample, FINISHED: finished, FINISHED_BEFORE: before[0]}
    return State(moved, after), finished.to(latents.dtype)


def _order_of(number: int, steps: int) -> int:
    """Return the order of the prediction in a step. The first and the last step have order 1."""
    return min(ORDER, number + 1, steps - number)


class _Move(NamedTuple):
    """Coefficients of a move from one noise level to another, which are float32 scalars."""

    keep: Tensor
    """Factor of the sample."""
    alpha: Tensor
    """Part of the finished sample at the end."""
    scale: Tensor
    """exp(-h) - 1, where h is the change of the logarithm of the signal-to-noise ratio."""
    h: Tensor


def _log_ratio(sigma: Tensor) -> Tensor:
    return torch.log(1 - sigma) - torch.log(sigma)


def _move(sigmas: Tensor, start: int) -> _Move:
    """Return the coefficients of the move from noise level `start` to the next one."""
    begin, end = sigmas[start], sigmas[start + 1]
    h = _log_ratio(end) - _log_ratio(begin)
    return _Move(end / begin, 1 - end, torch.expm1(-h), h)


def _ratio(sigmas: Tensor, start: int, move: _Move) -> Tensor:
    """Return the position of the noise level before `start` in units of the move."""
    return (_log_ratio(sigmas[start - 1]) - _log_ratio(sigmas[start])) / move.h


def _predicted(sample: Tensor, latest: Sequence[Tensor], sigmas: Tensor, start: int) -> Tensor:
    """Return the sample at the next noise level. `latest` are predictions, the newest first."""
    move, finished = _move(sigmas, start), latest[0]
    moved = move.keep * sample - move.alpha * move.scale * finished
    if len(latest) == ORDER:
        slope = (latest[1] - finished) / _ratio(sigmas, start, move)
        moved = moved - move.alpha * move.scale * (0.5 * slope)
    return moved.to(sample.dtype)


def _corrected(
    sample: Tensor, newest: Tensor, before: Sequence[Tensor], sigmas: Tensor, number: int
) -> Tensor:
    """Return the sample at noise level `number`, moved again from `sample` at the level before.

    `newest` is predicted at the end of the move, and `before` at its start and earlier.
    """
    start = number - 1
    move, finished = _move(sigmas, start), before[0]
    moved = move.keep * sample - move.alpha * move.scale * finished
    change = newest - finished
    if len(before) < ORDER:
        correction = 0.5 * change
    else:
        ratio = _ratio(sigmas, start, move)
        weights = _weights(ratio, move)
        correction = weights[0] * ((before[1] - finished) / ratio) + weights[1] * change
    return (moved - move.alpha * move.scale * correction).to(sample.dtype)


def _weights(ratio: Tensor, move: _Move) -> Tensor:
    """Return the weights of the two slopes of a correction, float32 [2]."""
    phi_2 = move.scale / -move.h - 1
    phi_3 = phi_2 / -move.h - 0.5
    points = torch.stack([ratio, torch.ones(())])
    matrix = torch.stack([torch.ones(ORDER), points])
    weights: Tensor = torch.linalg.solve(matrix, torch.stack([phi_2, phi_3 * 2]) / move.scale)
    return weights
