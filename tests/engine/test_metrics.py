"""Engine metrics match the work done, over any requests, preemptions and chunks."""

from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.records import AnyRecord, ChoiceDelta, TokenChunk
from shared.protocol.sampling import SamplingParams
from shared.telemetry.deltas import Samples, samples_of, total
from shared.telemetry.metrics import Metrics
from tests.fakes import FakeRunner
from tests.support.engine import make_core
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.sequence import EngineRequest, LoggedChoice
from workers.engine.metrics import EngineMetrics, RequestTiming

STEP_S = 0.25


class Rig:
    """A core, stepped as the worker does, on a clock on which every step takes as long."""

    def __init__(self, num_blocks: int = 12) -> None:
        self.runner = FakeRunner(block_size=4, vocab_size=100)
        self.core = make_core(
            self.runner,
            BlockPool(num_blocks, 4),
            vocab_size=100,
            max_num_batched_tokens=16,
            max_model_len=48,
        )
        self.metrics = Metrics("engine", "engine-1", "demo")
        self.meters = EngineMetrics(self.metrics, self.core.stats(), lambda s: 1000 * s)
        self.timings: dict[str, RequestTiming] = {}
        self.now_s = 10.0
        self.usages: list[int] = []

    def add(self, prompt: list[int], accepted_s: float = 10.0, **sampling: int) -> None:
        name = str(len(self.timings))
        params = SamplingParams(temperature=0.0, **sampling)  # type: ignore[arg-type]
        self.core.add(EngineRequest(name, prompt, [], params))
        self.timings[name] = RequestTiming(1000 * accepted_s, 1000 * self.now_s, len(prompt), False)

    def run(self) -> None:
        while self.core.has_work:
            self.step()

    def step(self) -> None:
        began_s = self.now_s
        outputs = self.core.step()
        self.now_s += STEP_S
        stats = self.core.stats()
        first_scheduled = (self.timings[name] for name in stats.first_scheduled)
        timed = [(self.timings[output.request_id], output) for output in outputs]
        self.meters.on_step(first_scheduled, iter(timed), stats, began_s, self.now_s)
        for timing, output in timed:
            if output.usage is not None:
                self.meters.on_finished(timing, 1000 * self.now_s)
                self.usages.append(output.usage.completion_tokens)

    @property
    def samples(self) -> Samples:
        return samples_of(self.metrics.snapshot())


def count(samples: Samples, name: str) -> float:
    return total(samples, f"{name}_bucket", le="inf")


def sum_of(metrics: Metrics, name: str) -> float:
    return metrics.histogram(name).total


# Prompt, tokens to generate, choices, and how many steps go by before it comes.
request_values = st.lists(
    st.tuples(
        st.lists(st.integers(1, 3), min_size=1, max_size=20),
        st.integers(1, 12),
        st.integers(1, 3),
        st.integers(0, 4),
    ),
    min_size=1,
    max_size=8,
)


@given(request_values)
def test_counters_match_the_work_done(work: list[tuple[list[int], int, int, int]]) -> None:
    rig = Rig()
    for prompt, max_tokens, n, pause in work:
        for _ in range(pause):
            if rig.core.has_work:
                rig.step()
        rig.add(prompt, max_tokens=max_tokens, n=n)
    rig.run()
    samples, num_choices = rig.samples, sum(n for _, _, n, _ in work)
    num_tokens = sum(max_tokens * n for _, max_tokens, n, _ in work)
    assert sum(rig.usages) == num_tokens
    assert total(samples, "generation_tokens_total") == num_tokens
    assert total(samples, "prompt_tokens_total") == sum(len(prompt) for prompt, *_ in work)
    assert total(samples, "request_success_total", finished_reason="length") == len(work)
    assert total(samples, "request_success_total") == len(work)
    assert count(samples, "inter_token_latency_seconds") == num_tokens - num_choices
    for name in (
        "time_to_first_token_seconds",
        "engine_time_to_first_token_seconds",
        "request_queue_time_seconds",
        "engine_queue_time_seconds",
        "e2e_request_latency_seconds",
    ):
        assert count(samples, name) == len(work)
    assert sum_of(rig.metrics, "iteration_tokens_total") == sum(rig.runner.batches)
    assert count(samples, "iteration_tokens_total") == len(rig.runner.batches)
    assert total(samples, "num_requests_running") == total(samples, "kv_cache_usage_perc") == 0


def test_times_are_from_acceptance_and_from_arrival() -> None:
    rig = Rig(num_blocks=64)
    rig.now_s = 12.0
    rig.add([1, 2, 3], accepted_s=10.0, max_tokens=3)
    rig.run()
    assert sum_of(rig.metrics, "request_queue_time_seconds") == 2.0
    assert sum_of(rig.metrics, "engine_queue_time_seconds") == 0.0
    assert sum_of(rig.metrics, "time_to_first_token_seconds") == 2.0 + STEP_S
    assert sum_of(rig.metrics, "engine_time_to_first_token_seconds") == STEP_S
    assert sum_of(rig.metrics, "inter_token_latency_seconds") == 2 * STEP_S
    assert sum_of(rig.metrics, "e2e_request_latency_seconds") == 2.0 + 3 * STEP_S
    assert total(rig.samples, "engine_step_seconds_total") == 3 * STEP_S


def test_steps_without_memory_are_counted_by_the_reaction() -> None:
    rig = Rig()
    rig.runner.max_tokens = 4
    rig.add([1] * 8, max_tokens=2)
    rig.run()
    shortages = "engine_memory_shortages_total"
    counts = {action: total(rig.samples, shortages, action=action) for action in ("retry", "cut")}
    assert counts == {"retry": 1, "cut": 1}
    assert total(rig.samples, shortages) == 2


def test_preemptions_and_waste_are_reported() -> None:
    rig = Rig()
    for first in range(3):
        rig.add([first, 2, 3, 4, 5, 6], max_tokens=20)
    rig.step()
    stats = rig.core.stats()
    # Fifteen tokens have been through the model, in two blocks for each of three sequences.
    assert stats.num_batched_tokens == 16
    assert 0 < stats.kv_waste < 1
    assert stats.first_scheduled == ("0", "1", "2")
    rig.run()
    assert total(rig.samples, "num_preemptions_total") > 0
    assert total(rig.samples, "kv_waste") == rig.core.stats().kv_waste


def test_a_cancellation_reports_no_new_requests() -> None:
    rig = Rig()
    rig.add([1, 2, 3], max_tokens=4)
    rig.step()
    assert rig.core.stats().first_scheduled == ("0",)
    rig.core.cancel("0")
    assert rig.core.stats().first_scheduled == ()


def test_first_tokens_of_an_earlier_attempt_are_not_counted() -> None:
    """A resumed request prefills its prompt again, but its client has not waited for that."""
    rig = Rig()
    params = SamplingParams(temperature=0.0, max_tokens=4)
    rig.core.add(EngineRequest("0", [1, 2, 3], [], params, [LoggedChoice([7, 7], False)]))
    rig.timings["0"] = RequestTiming(0.0, 0.0, 3, True)
    rig.run()
    samples = rig.samples
    assert total(samples, "generation_tokens_total") == 2
    assert total(samples, "prompt_tokens_total") == 3
    assert count(samples, "time_to_first_token_seconds") == 0
    assert count(samples, "inter_token_latency_seconds") == 1


def test_a_logged_stop_event_is_recognised() -> None:
    log: list[AnyRecord] = [
        TokenChunk(0, 1, [ChoiceDelta(0, 0, [7], "x", "length")]),
        TokenChunk(1, 1, [ChoiceDelta(1, 0, [7], "x")]),
    ]
    assert RequestTiming.of(5.0, 6.0, 2, log) == RequestTiming(5.0, 6.0, 2, True, "length")
    assert RequestTiming.of(5.0, 6.0, 2, []) == RequestTiming(5.0, 6.0, 2, False)
