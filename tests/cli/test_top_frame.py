"""Frames of `pagemill top`, from surveys made by hand."""

import io
import re
from dataclasses import replace

import pytest
from msgspec.structs import replace as replace_struct
from rich.console import Console
from rich.live import Live

from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat, PoolPlan, StartReport
from shared.telemetry.deltas import ClusterSnapshot, StageQueue
from shared.telemetry.metrics import Metrics
from workers.cli.top import Screen, render
from workers.cli.top_frame import Frame, frame


def engine(
    worker: str, *, prompt: int = 0, out: int = 0, first: tuple[float, ...] = (), started_s: float
) -> Metrics:
    metrics = Metrics("engine", worker, "demo")
    metrics.set_function("start_time_seconds", lambda: started_s)
    metrics.counter("prompt_tokens_total").add(prompt)
    metrics.counter("generation_tokens_total").add(out)
    metrics.set_function("prefix_cache_queries_total", lambda: prompt)
    metrics.set_function("prefix_cache_hits_total", lambda: prompt / 4)
    metrics.set_function("num_preemptions_total", lambda: 3)
    metrics.set_function("num_requests_running", lambda: 2)
    metrics.set_function("num_requests_waiting", lambda: 1)
    metrics.set_function("kv_cache_usage_perc", lambda: 0.25)
    metrics.set_function("kv_waste", lambda: 0.02)
    for value in first:
        metrics.histogram("time_to_first_token_seconds").observe(value)
    return metrics


def survey(
    at_s: float,
    *answering: Metrics,
    silent: tuple[str, ...] = (),
    queues: tuple[StageQueue, ...] = (),
) -> ClusterSnapshot:
    snapshots = [metrics.snapshot() for metrics in answering]
    workers = [metrics.worker for metrics in snapshots] + list(silent)
    return ClusterSnapshot(
        at_ms=1000 * at_s,
        beats=[Heartbeat("engine", w, "0.1.0", 1, ["demo"], {}) for w in workers],
        metrics={metrics.worker: metrics for metrics in snapshots},
        queues=list(queues),
        in_flight=4,
        shared_in_flight=4,
        oldest_ms=1000 * (at_s - 1.5),
        dead_letters=1,
    )


def shown(view: Frame | Unavailable) -> str:
    out = io.StringIO()
    Console(file=out, width=120).print(render(view))
    return out.getvalue()


def test_rates_are_of_the_time_between_two_looks() -> None:
    before = survey(100, engine("a", prompt=1000, out=500, first=(40.0,), started_s=1))
    now = survey(
        102,
        engine("a", prompt=1200, out=600, first=(40.0, *[0.2] * 18, 3.0, 3.0), started_s=1),
        engine("b", prompt=40, out=20, started_s=101),
    )
    (row,) = frame(before, now).models
    assert row.flow.prompt_tokens_per_s == 120
    assert row.flow.generation_tokens_per_s == 60
    assert row.flow.prefix_hit_rate == 0.25
    p50, p95 = row.flow.time_to_first_token_p50_s, row.flow.time_to_first_token_p95_s
    assert p50 is not None
    assert p95 is not None
    assert 0.15 < p50 <= 0.25 < 2.5 < p95 <= 5.0
    assert row.totals.prompt_tokens == 1240
    assert row.totals.preemptions == 6
    each = {e.worker: e.flow.generation_tokens_per_s for e in frame(before, now).engines}
    assert each == {"a": 50, "b": 10}


def test_a_first_frame_has_no_rates() -> None:
    first = frame(None, survey(100, engine("a", prompt=7, started_s=1)))
    assert first.interval_s is None
    assert first.models[0].flow.prompt_tokens_per_s is None
    assert first.models[0].totals.prompt_tokens == 7


def test_workers_come_and_go_and_fall_silent() -> None:
    both = survey(100, engine("a", out=10, started_s=1), engine("b", out=10, started_s=1))
    alone = survey(101, engine("a", out=30, started_s=1), silent=("b",))
    latest = frame(both, alone)
    assert [(p.workers, p.silent) for p in latest.pools] == [(2, 1)]
    assert [e.worker for e in latest.engines] == ["a"]
    assert latest.models[0].flow.generation_tokens_per_s == 20
    # Work from its silent time counts in no interval.
    again = frame(
        alone, survey(102, engine("a", out=30, started_s=1), engine("b", out=99, started_s=1))
    )
    assert again.models[0].flow.generation_tokens_per_s == 0
    nobody = frame(both, survey(101))
    assert (nobody.pools, nobody.models, nobody.engines) == ([], [], [])
    assert "in flight" in shown(nobody)


def test_queues_are_shown_with_the_age_of_what_waits() -> None:
    queues = (
        StageQueue("engine", "demo", "batch", 0, 0, None),
        StageQueue("engine", "demo", "interactive", 3, 2, 97_500.0),
    )
    first = frame(None, survey(100, engine("engine-a", started_s=1), queues=queues))
    assert [(q.lane, q.pending, q.in_flight, q.oldest_s) for q in first.queues] == [
        ("interactive", 3, 2, 2.5),
        ("batch", 0, 0, None),
    ]
    assert first.oldest_request_s == 1.5
    image = shown(first)
    for part in ("4 requests in flight", "1 dead letters", "2.5 s", "engine-a", "25.0%", "2.0%"):
        assert part in image


def test_a_worker_that_starts_is_shown_with_its_progress_and_in_no_pool() -> None:
    reports = [
        StartReport(
            "engine", "engine-b", "0.1.0", 2, "reading weights", "demo", "", 12 * 10**8, 47 * 10**8
        ),
        StartReport("renderer", "renderer-c", "0.1.0", 3, "warming up [demo]"),
    ]
    first = frame(None, replace(survey(100, engine("engine-a", started_s=1)), starting=reports))
    assert [(p.role, p.workers) for p in first.pools] == [("engine", 1)]
    assert [row.worker for row in first.starting] == ["engine-b", "renderer-c"]
    image = [" ".join(text.split()) for text in shown(first).splitlines()]
    assert "engine-b demo reading weights 1,200 4,700" in image
    assert "renderer-c warming up [demo] - -" in image
    assert "starting" not in shown(frame(None, survey(100)))


def test_a_stage_with_a_queue_and_no_worker_is_a_pool_of_none() -> None:
    queues = tuple(
        StageQueue(stage, model, lane, 0, 0, None)
        for stage, model in [("engine", "demo"), ("engine", "other"), ("coordinator", "")]
        for lane in ("interactive", "batch")
    )
    first = frame(None, survey(100, engine("engine-a", started_s=1), queues=queues))
    assert [(p.role, p.models, p.workers) for p in first.pools] == [
        ("engine", ["demo"], 1),
        ("engine", ["other"], 0),
    ]


@pytest.mark.parametrize("name", ["[bold]x[/]", "[/nonsense]"])
def test_a_name_is_no_markup(name: str) -> None:
    queues = (StageQueue(name, "demo", "batch", 0, 0, None),)
    assert name in shown(frame(None, survey(100, queues=queues)))
    assert name in shown(Unavailable(f"no nats-server answers at {name}"))


def test_the_busy_share_is_of_the_time_between_two_looks() -> None:
    busy_s = 3.0
    busy = engine("a", started_s=0)
    busy.set_function("engine_device_seconds_total", lambda: busy_s)
    before = survey(10, busy)
    busy_s = 4.5
    assert [row.device_busy for row in frame(before, survey(12, busy)).engines] == [0.75]
    (row,) = frame(None, survey(12, busy)).engines
    assert row.device_busy is None


def test_pools_at_zero_are_shown_although_they_have_no_worker() -> None:
    plans = {
        "engine/demo": PoolPlan(0, reason="demand"),
        "encoder/demo": PoolPlan(1, starting=1, starting_s=3.4, reason="woken"),
    }
    first = frame(None, replace(survey(100), pools=plans))
    assert [(row.pool, row.state) for row in first.scale] == [
        ("encoder/demo", "starting for 3 s"),
        ("engine/demo", "at zero"),
    ]
    assert "at zero" in shown(first)
    assert "scaled pool" not in shown(frame(None, survey(100)))


def test_engines_on_gpus_have_columns_of_their_devices() -> None:
    on_gpu = engine("engine-1", started_s=0)
    on_gpu.set_function("gpu_memory_total_bytes", lambda: 80.0, gpu="GPU-1")
    on_gpu.set_function("gpu_memory_used_bytes", lambda: 60.0, gpu="GPU-1")
    on_gpu.set_function("gpu_utilization", lambda: 0.95, gpu="GPU-1")
    on_cpu = engine("engine-2", started_s=0)
    view = frame(None, survey(10, on_gpu, on_cpu))
    assert [(row.gpu_utilization, row.gpu_memory_usage) for row in view.engines] == [
        (0.95, 0.75),
        (None, None),
    ]
    assert "GPU memory" in shown(view)
    assert "95.0%" in shown(view)
    assert "GPU" not in shown(frame(None, survey(10, on_cpu)))


def on_screen(view: Frame, *keys: str) -> list[str]:
    """Return the lines of a terminal of 80 x 24 characters after these keys."""
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=False)
    screen = Screen(Live(console=console, auto_refresh=False))
    screen.show(view)
    assert all(screen.press(key) for key in keys)
    assert not screen.press("q")
    console.print(screen.render(view))
    return out.getvalue().splitlines()


def test_a_terminal_of_80_x_24_shows_the_rates_first_and_keys_choose_the_rest() -> None:
    served = ["small", "a-model-with-a-name-that-is-longer-than-half-of-the-screen", "quick"]
    engines = [engine(f"engine-{n}-1a2b3c4d", out=n, started_s=1) for n in range(3)]
    later = [engine(f"engine-{n}-1a2b3c4d", out=20_000 * n, started_s=1) for n in range(3)]
    queues = tuple(
        StageQueue("engine", f"m{n}", lane, 0, 0, None)
        for n in range(20)
        for lane in ("interactive", "batch")
    )

    def view_of(at_s: float, workers: list[Metrics]) -> ClusterSnapshot:
        view = survey(at_s, *workers, queues=queues)
        beats = [replace_struct(b, models=[m]) for b, m in zip(view.beats, served, strict=True)]
        return replace(view, beats=beats)

    view = frame(view_of(100, engines), view_of(101, later))
    lines = on_screen(view)
    assert len(lines) == 24
    assert max(map(len, lines)) <= 80
    assert re.sub("  +", "|", lines[2]) == "model|req/s|out tok/s|in tok/s|TTFT p50|p95|ITL p50"
    assert [line.split()[0] for line in lines[3:6]] == ["quick", "a-model-with-a-name…", "small"]
    assert "39,998.0" in lines[3]
    assert lines[-1].endswith("s sort: out tok/s  35 more lines")
    ascending = on_screen(view, "s", "s", "s")
    assert [line[:5] for line in ascending[3:6]] == ["a-mod", "quick", "small"]
    only = on_screen(view, "j", "j", "k", "\n")
    assert "small" not in "".join(only)
    assert "engine-2" in "".join(only)
    assert len(on_screen(view, "j", "\n", "\n")) == 24
