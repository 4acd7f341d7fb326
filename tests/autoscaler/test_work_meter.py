"""Work of pools, as the autoscaler measures it from heartbeats and queues."""

import msgspec

from shared.config.schema import Config, EnginePool, ModelConfig, PoolConfig, ScaleConfig
from shared.protocol.messages import Heartbeat
from shared.scaling.pools import PoolFigures, PromptFigures, WorkFigures
from tests.autoscaler.conftest import ENCODER, ENGINE, beat, two_pools
from workers.autoscaler.work_meter import KEEP_S, RATE_S, WorkMeter
from workers.pools import pools_of

EMPTY = PoolFigures(0, 0, 0.0, 1)


def renderer(tasks: int, tokens: int, model: str = "demo") -> Heartbeat:
    load = {f"rendered_tasks/{model}": 1.0 * tasks, f"rendered_tokens/{model}": 1.0 * tokens}
    return msgspec.structs.replace(beat(1, "renderer"), load=load)


class Meter:
    def __init__(self) -> None:
        self.meter = WorkMeter(two_pools())
        self.now_s = 0.0

    def look(self, figures: PoolFigures, *beats: Heartbeat) -> WorkFigures | None:
        self.now_s += 1.0
        measured = self.meter.look({ENGINE: figures, ENCODER: None}, beats, self.now_s)
        assert measured[ENCODER] is None
        engine = measured[ENGINE]
        assert engine is not None
        return engine.work


def test_there_is_no_work_before_a_task_has_ended() -> None:
    meter = Meter()
    assert meter.look(PoolFigures(5, 0, 0.0, 1), beat(70)) is None
    assert meter.look(PoolFigures(5, 0, 0.0, 1), beat(70)) is None


def test_the_time_of_a_task_is_the_mean_of_all_workers() -> None:
    meter = Meter()
    first = [beat(70, tasks=100, tasks_s=1.0), beat(71, tasks=7, tasks_s=9.0)]
    later = [beat(70, tasks=103, tasks_s=7.0), beat(71, tasks=8, tasks_s=11.0)]
    meter.look(EMPTY, *first)
    assert meter.look(EMPTY, *later) == WorkFigures(4 / RATE_S, 2.0, 4)
    # Tasks of an encoder, and those of a worker before its first heartbeat, are not counted.
    others = [beat(72, tasks=50, tasks_s=900.0), beat(73, "encoder", tasks=9, tasks_s=90.0)]
    assert meter.look(EMPTY, *later, *others) == WorkFigures(4 / RATE_S, 2.0)
    # The last known time outlives the workers.
    meter.now_s += 2 * KEEP_S
    assert meter.look(EMPTY) == WorkFigures(0.0, 2.0)


def test_tasks_arrive_when_they_are_queued_and_not_when_they_end() -> None:
    meter = Meter()
    meter.look(EMPTY, beat(70, tasks=0, tasks_s=0.0))
    meter.look(PoolFigures(40, 20, 0.0, 1), beat(70, tasks=0, tasks_s=0.0))
    for ended in (30, 60):
        figures = PoolFigures(60 - ended, 0, 0.0, 1)
        work = meter.look(figures, beat(70, tasks=ended, tasks_s=1.0 * ended))
        assert work == WorkFigures(60 / RATE_S, 1.0, 30)
    meter.now_s += RATE_S
    assert meter.look(EMPTY, beat(70, tasks=60, tasks_s=60.0)) == WorkFigures(0.0, 1.0)


def test_a_worker_that_was_silent_is_not_counted_twice() -> None:
    meter = Meter()
    worker = beat(70, tasks=10, tasks_s=10.0)
    meter.look(EMPTY, beat(70, tasks=8, tasks_s=8.0))
    assert meter.look(EMPTY, worker) == WorkFigures(2 / RATE_S, 1.0, 2)
    meter.look(EMPTY)
    assert meter.look(EMPTY, worker) == WorkFigures(2 / RATE_S, 1.0)


def test_waiting_prompts_are_the_last_rendered_ones_and_those_that_engines_have_not_begun() -> None:
    meter = Meter()
    engine = beat(70, tasks=0, tasks_s=0.0, prompt_tokens=500, prompt_tokens_per_s=2000.0)
    second = beat(71, tasks=0, tasks_s=0.0, prompt_tokens_per_s=4000.0)
    meter.look(EMPTY, engine, second, renderer(100, 10_000))
    # Ten short prompts, and then two long ones, which still wait.
    meter.look(EMPTY, engine, second, renderer(110, 10_100))
    ended = beat(71, tasks=10, tasks_s=1.0, prompt_tokens_per_s=4000.0)
    work = meter.look(PoolFigures(2, 0, 0.0, 2), engine, ended, renderer(112, 30_100))
    assert work is not None
    assert work.prompts == PromptFigures(20_500.0, 20_100 / RATE_S, 3000.0)
    # More tasks wait than the meter has seen rendered: they count like the known ones.
    work = meter.look(PoolFigures(24, 0, 0.0, 2), engine, ended, renderer(112, 30_100))
    assert work is not None
    assert work.prompts is not None
    assert work.prompts.waiting == 500 + 2 * 20_100
    # Prompts of another model do not count.
    other = renderer(9, 10**6, "other")
    work = meter.look(PoolFigures(1, 0, 0.0, 2), engine, ended, renderer(112, 30_100), other)
    assert work is not None
    assert work.prompts is not None
    assert work.prompts.arriving == 20_100 / RATE_S


def test_pools_that_share_a_queue_have_no_work() -> None:
    entries = [PoolConfig(role="engine", pool=name, max=4) for name in ("small", "large")]
    model = ModelConfig("demo", pools={"small": EnginePool(), "large": EnginePool()})
    pools = pools_of(Config({"demo": model}, scale=ScaleConfig(entries)))
    meter = WorkMeter(pools)
    figures = dict.fromkeys(pools.by_name, EMPTY)
    for tasks in (0, 9):
        small = msgspec.structs.replace(beat(70, tasks=tasks, tasks_s=1.0 * tasks), pool="small")
        measured = meter.look(figures, [small], tasks + 1.0)
    assert measured == figures
