"""Stored states of unfinished images: what comes back, and what begins again."""

import numpy as np
import pytest

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.protocol.images import PaintParams
from shared.protocol.records import StepState
from workers.generator.core.denoising import Progress
from workers.generator.core.painting import Painting, decode_state, encode_state

LATENTS = np.arange(12, dtype=np.float32).reshape(1, 3, 4)
INITIAL = Progress(from_numpy(np.zeros_like(LATENTS)), {})
SOLVER = {"first": from_numpy(LATENTS[0] * 2), "second": from_numpy(np.array([0.1]))}


def test_a_state_has_the_latents_and_what_the_solver_remembers() -> None:
    data = encode_state(Progress(from_numpy(LATENTS), SOLVER), 7)
    progress = decode_state(data, 7, INITIAL._replace(solver=SOLVER))
    assert progress is not None
    np.testing.assert_array_equal(to_numpy(progress.latents), LATENTS)
    assert list(progress.solver) == ["first", "second"]
    for name, tensor in progress.solver.items():
        np.testing.assert_array_equal(to_numpy(tensor), to_numpy(SOLVER[name]))


def test_latents_of_a_type_that_numpy_does_not_have_are_stored() -> None:
    data = np.arange(8, dtype=np.uint8).data
    half = TensorData("bfloat16", (2, 2), data)
    progress = decode_state(encode_state(Progress(half, {}), 1), 1, Progress(half, {}))
    assert progress is not None
    assert progress.latents == half


@pytest.mark.parametrize(
    ("data", "step"),
    [
        (encode_state(Progress(from_numpy(LATENTS), {}), 2), 3),
        (encode_state(Progress(from_numpy(LATENTS.astype(np.float64)), {}), 3), 3),
        (encode_state(Progress(from_numpy(LATENTS[:, :2]), {}), 3), 3),
        (LATENTS.tobytes(), 3),  # as workers of version 0.1 store them
        (encode_state(Progress(from_numpy(LATENTS), SOLVER), 3), 3),
        (encode_state(Progress(from_numpy(LATENTS), {}), 3)[:-64], 3),
        (b"", 3),
    ],
)
def test_a_state_of_another_step_model_dtype_or_version_is_not_used(data: bytes, step: int) -> None:
    assert decode_state(data, step, INITIAL) is None


def test_each_state_has_the_place_of_the_last_but_one() -> None:
    params = PaintParams("16x16", 2)
    painting = Painting(params, [StepState(0, 0, 0, 1, 9, "media:a"), StepState(1, 0, 1, 1, 9)])
    assert [painting.next_place(number) for number in (0, 1)] == [1, 0]
    painting.count_state(0)
    assert painting.next_place(0) == 0
