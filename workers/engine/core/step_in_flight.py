"""A step between its launch and its result. Errors of all its parts are raised by the result."""

from collections.abc import Sequence as Values

from workers.engine.core.sequence import Batch, SampledToken
from workers.engine.core.step_cost import StepWork
from workers.engine.core.step_runner import Launched, StepRunner


class StepInFlight:
    """A step that the runner computes, and the error that has ended it, if there is one."""

    def __init__(
        self, runner: StepRunner, batch: Batch, unverified: list[int], work: StepWork
    ) -> None:
        """Launch the batch. The `unverified` blocks are overwritten first."""
        self.batch = batch
        self.work = work
        self.error: Exception | None = None
        self._launched: Launched | None = None
        try:
            self._launched = _launch(runner, batch, unverified)
        except Exception as error:
            self.error = error

    def sample(self, indexes: Values[int]) -> None:
        """Sample the tokens of these sequences of the batch; see `Launched.sample`."""
        if self._launched is not None:
            try:
                self._launched.sample(indexes)
            except Exception as error:
                self.error = error

    def result(self) -> list[list[SampledToken]]:
        """Return the tokens of each sampled sequence. Raises the error of any part of the step."""
        if self.error is not None:
            raise self.error
        assert self._launched is not None
        return self._launched.result()


def _launch(runner: StepRunner, batch: Batch, unverified: list[int]) -> Launched:
    for s in batch.scheduled:
        s.sequence.num_launched_tokens = s.end
    if unverified:
        runner.zero_blocks(unverified)
    if batch.copies:
        runner.copy_blocks(batch.copies)
    return runner.launch(batch)
