"""The step thread: requests, outputs, and cancellations, which free blocks."""

import threading

from shared.protocol.sampling import SamplingParams
from tests.fakes import FakeLaunched, FakeRunner
from tests.support.engine import make_core
from tests.support.waiting import wait_until
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.sequence import Batch, EngineRequest, RequestOutput
from workers.engine.step_thread import StepThread


class SlowRunner(FakeRunner):
    """A runner whose step lasts until released, so that a test knows the state of the loop."""

    def __init__(self) -> None:
        super().__init__(block_size=4, vocab_size=100)
        self.begun = threading.Semaphore(0)
        self.go_on = threading.Semaphore(0)

    def launch(self, batch: Batch) -> FakeLaunched:
        self.begun.release()
        self.go_on.acquire()
        return super().launch(batch)


def test_a_cancelled_request_holds_no_blocks_in_the_next_step() -> None:
    runner = SlowRunner()
    core = make_core(runner, BlockPool(64, 4), 100, max_model_len=128)
    steps_done: list[tuple[list[tuple[str, RequestOutput]], EngineStats]] = []
    steps: StepThread[str] = StepThread(
        core, lambda o, s: steps_done.append((o, s)), lambda error: None
    )
    sampling = SamplingParams(max_tokens=100, temperature=0.0)
    steps.add(EngineRequest("keep", [1, 2, 3], [], sampling), "keep")
    steps.add(EngineRequest("cancel", [4, 5, 6], [], sampling), "cancel")
    steps.start()
    runner.begun.acquire()
    assert steps.step_s > 0
    steps.cancel("cancel")
    runner.go_on.release()
    runner.begun.acquire()
    # The next step has been scheduled, without it.
    runner.go_on.release()
    runner.begun.acquire()
    outputs, stats = steps_done[1]
    assert [owner for owner, _ in outputs] == ["keep"]
    assert stats.num_blocks - stats.num_free_blocks == 1
    assert stats.num_running == 1
    steps.cancel("keep")
    for _ in range(2):
        runner.go_on.release()
    wait_until(lambda: steps_done[-1][1].num_free_blocks == 64)
    assert steps.step_s == 0
    assert core._scheduler.step_cost.is_known
    steps.stop()
