"""The arithmetic of the comparison, and our own engine through it as a peer."""

from pathlib import Path

import pytest

from ops.bench.peers import records, report
from ops.bench.peers.floors import Limits, Shape, Work, decode, floor_s, prefill
from ops.bench.peers.measure import Plan, measure_model
from ops.bench.peers.process import PeerFailed, PeerProcess
from ops.bench.peers.protocol import Request, Setup
from ops.bench.peers.records import Machine, Repetition, Row
from ops.bench.peers.roster import ROSTER
from ops.bench.peers.stopwatch import Stopwatch
from ops.bench.peers.workloads import WORKLOADS, Maker, Workload
from ops.harness import machine
from tests import preloaded
from workers.settings import DEMO_MODEL

SMOLLM2 = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
}
LIMITS = Limits(read_bytes_s=26e9, gemm_flops_s={32: 8e11, 2048: 2.5e12})


def row(peer: str, walls_s: list[float], first_tokens: list[list[int]]) -> Row:
    repetitions = [Repetition(s, [s / 4], [s], [128], 0.0) for s in walls_s]
    shape, work = Shape.of(SMOLLM2), Work(1, 128, 32)
    return Row("m", "single", peer, shape, work, repetitions, 1.0, 10**9, first_tokens)


def test_the_matrices_of_a_model_are_all_its_parameters_but_norms() -> None:
    shape = Shape.of(SMOLLM2)
    assert shape.layers + shape.head == 134_515_008 - 61 * 576  # as transformers counts it


def test_one_stream_is_limited_by_reading_and_a_long_prompt_by_arithmetic() -> None:
    shape, work = Shape.of(SMOLLM2), Work(1, 128, 32)
    assert decode(shape, work).floor_s(LIMITS) == 127 * shape.weight_bytes / 26e9
    long = prefill(shape, Work(1, 1, 4096))
    assert long.floor_s(LIMITS) == long.flops / 2.5e12
    assert floor_s(shape, work, LIMITS) > decode(shape, work).floor_s(LIMITS)


@pytest.mark.parametrize(
    ("num_rows", "rate"), [(1, 8e11), (32, 8e11), (2047, 8e11), (4096, 2.5e12)]
)
def test_the_rate_is_that_of_the_rows_measured_below(num_rows: int, rate: float) -> None:
    assert LIMITS.flops_s(num_rows) == rate


def test_of_two_measurements_the_better_holds() -> None:
    other = Limits(20e9, {32: 9e11, 2048: 1e12})
    assert LIMITS.best(other) == Limits(26e9, {32: 9e11, 2048: 2.5e12})


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda workload: workload.name)
def test_a_repetition_has_different_prompts_and_always_the_same(
    workload: Workload, tmp_path: Path
) -> None:
    def prompts(repetition: int) -> list[tuple[list[int], str | None]]:
        requests = workload.requests(repetition, 4096, tmp_path)
        return [(request.token_ids, request.image) for request in requests]

    first, other = prompts(1), prompts(2)
    assert first == prompts(1)
    assert not any(prompt in other for prompt in first)


def test_speed_is_compared_within_a_repetition() -> None:
    ours, theirs = row("pagemill", [1.0, 3.0], [[1]]), row("vllm", [2.0, 6.0], [[1]])
    assert ours.speed_against(theirs) == 2.0


def test_a_difference_is_reported_with_its_place() -> None:
    rows = [row("vllm", [1.0], [[1, 2], [5, 6]]), row("pagemill", [1.0], [[1, 2], [5, 7]])]
    (line,) = report.differences(rows)
    assert line == "m single: vllm differs from pagemill in request 1 from token 1 on (6 for 7)"


def test_a_run_can_be_read_again(tmp_path: Path) -> None:
    about, rows = Machine("cpu", 2, "2026-01-01", LIMITS), [row("pagemill", [1.0], [[1]])]
    records.write(tmp_path / "run.jsonl", about, rows)
    assert records.read(tmp_path / "run.jsonl") == (about, rows)


def test_the_stopwatch_charges_each_with_what_is_his_own() -> None:
    times = iter([0.0, 1.0, 4.0, 10.0])
    stopwatch = Stopwatch(lambda: next(times))

    class Engine:
        def step(self) -> None:
            self.forward()

        def forward(self) -> None:
            pass

    engine = Engine()
    stopwatch.watch(engine, "step", "rest")
    stopwatch.watch(engine, "forward", "forward")
    engine.step()
    assert stopwatch.total_s == {"forward": 3.0, "rest": 7.0}


def test_two_runs_do_not_share_the_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with machine.alone(), pytest.raises(SystemExit), machine.alone():
        pass


def _two_short(maker: Maker) -> list[Request]:
    return [Request(4, maker.token_ids(8)), Request(4, maker.token_ids(12))]


def _an_image(maker: Maker) -> list[Request]:
    return [Request(4, image=maker.image(), text=maker.text())]


@pytest.fixture
def forked_peers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork peers of our own environment: the imports of a new process take five seconds."""
    python = tmp_path / "python"
    preloaded.write_python(python)
    monkeypatch.setattr("sys.executable", str(python))


@pytest.mark.long
@pytest.mark.usefixtures("forked_peers")
@pytest.mark.timeout(300)
def test_our_engine_alone_and_over_the_bus_give_one_answer(tmp_path: Path) -> None:
    models = tmp_path / "models"
    models.mkdir()
    (models / "demo").symlink_to(DEMO_MODEL)
    workloads = [Workload("text", _two_short), Workload("image", _an_image, image_side=448)]
    lines: list[str] = []
    ours = [spec for spec in ROSTER if spec.name.startswith("pagemill")]
    setup = Setup("", threads=1, max_model_len=512, profile=True)
    plan = Plan(tmp_path, models, ours, workloads, 1, setup, tmp_path, lines.append)
    rows = measure_model(plan, "demo")
    assert [(r.workload, r.peer) for r in rows] == [
        (workload, peer) for workload in ("text", "image") for peer in ("pagemill", "pagemill-bus")
    ], lines
    assert report.differences(rows) == []
    direct = rows[2]
    assert direct.work.prefill_tokens > 48  # the template's, the text's, and the image's
    assert {"forward", "sample", "encode images"} <= set(direct.repetitions[0].phases)
    assert all(0 < r.ttft_s <= r.wall_s and r.peak_bytes > 0 for r in rows)


@pytest.mark.usefixtures("forked_peers")
def test_a_peer_that_cannot_says_why(tmp_path: Path) -> None:
    (spec, *_) = ROSTER
    python = spec.python(tmp_path)
    assert python is not None
    with pytest.raises(PeerFailed, match="has no config"):
        PeerProcess(spec, python, Setup(str(tmp_path), 1), tmp_path)
