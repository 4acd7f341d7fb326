"""DPM-Solver++ compared with the scheduler of diffusers, with a stored state between steps."""

from typing import Any

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from shared.codec.tensors import from_torch, to_torch
from workers.generator.core.denoising import Progress
from workers.generator.core.painting import decode_state, encode_state
from workers.generator.diffusion import transfers
from workers.generator.diffusion.dpm_solver import (
    PREVIOUS,
    begin,
    check_scheduler,
    make_schedule,
    move,
)
from workers.generator.diffusion.flow_match import Schedule
from workers.generator.diffusion.transfers import State, download

FLOW = {"use_flow_sigmas": True, "flow_shift": 3.0, "prediction_type": "flow_prediction"}
SETTINGS: list[dict[str, Any]] = [
    {},
    {"solver_order": 1},
    {"solver_type": "heun"},
    {"prediction_type": "v_prediction", "rescale_betas_zero_snr": True},
    # The published folders of Sana have these settings.
    FLOW,
    {"use_karras_sigmas": True, "timestep_spacing": "trailing"},
    {"final_sigmas_type": "sigma_min", "lower_order_final": False},
    {"final_sigmas_type": "sigma_min"},
    {"final_sigmas_type": "sigma_min", "euler_at_final": True},
]


def predict(latents: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
    """Return the output of a network, which depends on both."""
    return torch.sin(3 * latents + time / 500)


def moved(
    scheduler: Any, schedule: Schedule, number: int, progress: Progress, predicted: torch.Tensor
) -> Progress:
    state = State(to_torch(progress.latents), {PREVIOUS: to_torch(progress.solver[PREVIOUS])})
    after = move(scheduler.config, schedule, number, state, predicted)
    (stepped,) = download([after], [after.latents])
    return stepped.progress


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("steps", [1, 4, 16])
def test_latents_equal_the_schedulers_after_each_step(
    settings: dict[str, Any], dtype: torch.dtype, steps: int
) -> None:
    scheduler = DPMSolverMultistepScheduler(**settings)
    check_scheduler(scheduler)
    schedule = make_schedule(scheduler, steps)
    scheduler.set_timesteps(steps)
    latents = torch.randn((2, 3, 4), generator=torch.Generator().manual_seed(0)).to(dtype)
    initial = progress = begin(latents)
    for number, time in enumerate(scheduler.timesteps):
        assert schedule.times[number] == time
        predicted = predict(latents, time)
        latents = scheduler.step(predicted, time, latents, return_dict=False)[0]
        after = moved(scheduler, schedule, number, progress, predicted)
        assert torch.equal(to_torch(after.latents), latents)
        assert latents.isfinite().all()
        resumed = decode_state(encode_state(after, number), number, initial)
        assert resumed is not None
        progress = resumed


def test_the_second_order_depends_on_the_step_before() -> None:
    scheduler = DPMSolverMultistepScheduler()
    schedule, latents = make_schedule(scheduler, 4), torch.ones((2, 3, 4))
    progress = begin(latents)
    for number in range(2):
        last = progress
        progress = moved(scheduler, schedule, number, progress, predict(latents, latents))
    forgot = Progress(last.latents, {"previous": from_torch(torch.zeros_like(latents))})
    other = moved(scheduler, schedule, 1, forgot, predict(latents, latents))
    assert other.latents != progress.latents


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"algorithm_type": "sde-dpmsolver++"}, "algorithm_type 'sde-dpmsolver\\+\\+' is not"),
        ({"solver_order": 3}, "solver_order 3 is not supported; supported: 1, 2"),
        ({"prediction_type": "sample"}, "prediction_type 'sample' is not supported"),
        ({"thresholding": True}, "thresholding True is not supported; supported: False"),
        ({"variance_type": "learned"}, "variance_type 'learned' is not supported"),
        ({"timestep_spacing": "x"}, "x is not supported"),
        ({"beta_end": float("nan")}, "noise levels that are not finite"),
    ],
)
def test_other_algorithms_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_scheduler(DPMSolverMultistepScheduler(**settings))


def test_tensors_of_any_size_and_dtype_are_copied_together() -> None:
    dtypes = torch.bfloat16, torch.float32, torch.float64
    tensors = [torch.rand(3, n, dtype=dtype).T for n, dtype in enumerate(dtypes, 1)]
    copied = transfers._unpack(transfers._pack(tensors), tensors)
    assert all(torch.equal(*pair) for pair in zip(copied, tensors, strict=True))
    assert [tensor.dtype for tensor in copied] == [*dtypes]
