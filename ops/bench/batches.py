"""Measure batches: lines a second, what a batch costs an engine, and users next to batches.

- lines: a scripted model, which computes nothing. The table has the time of each phase, and the
  processor time of each process for a line
- engine: tokens a second of a batch, compared with the same requests from a client of the bus, and
  with the core of the engine alone, always with as many sequences as it computes at once
- users: bursts of short requests over HTTP, alone and next to batches that never run dry. The batch
  is compared with a batch alone in the time in which the users leave the engine idle

    python -m ops.bench.batches [lines] [engine] [users] [--model FOLDER] [--rounds 3]

The model is by default a random one in the shape of SmolLM2-135M.
"""

import argparse
import asyncio
import contextlib
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import uvloop

from ops.bench.gateway.transports import OverHttp, OverNats, Prepared
from ops.bench.models import write_random_llama
from ops.bench.peers.protocol import Request
from ops.bench.servers import MODEL, bench_tree
from ops.chaos.agents import scripted_model
from ops.chaos.agents.scripted_model import ScriptedModel
from ops.harness import machine
from ops.harness.deployment import Deployment, deployment, write_config
from ops.harness.machine import processor_s
from ops.harness.processes import Processes, worker_command
from ops.harness.samples import Samples, in_turns
from ops.harness.tables import print_table
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import Config, DeliveryConfig, NatsConfig
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from workers import settings
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.roles import WorkerSpec, default_workers
from workers.settings import DEMO_MODEL

PARTS = ("lines", "engine", "users")
RANDOM_MODEL = "random-135m"
MAX_MODEL_LEN = 1024
FIRST_ID, LAST_ID = 300, 40_000
NUM_ENGINES = 2
"""Engines that the scripted model stands for."""
COMPLETIONS = "/v1/completions"
ENDED = ("completed", "failed", "expired", "cancelled")
POLL_S = 0.1
BEAT_S = 2.0
# The middle of a batch, in which as many lines as possible are in flight.
MIDDLE = (0.1, 0.9)
BURST, BURST_PERIOD_S = 4, 3.0
NUM_BATCHES = 2


@dataclass(frozen=True)
class Sizes:
    """Tokens of prompts and answers."""

    prompt: int
    answer: int


BULK, USER = Sizes(64, 64), Sizes(32, 24)


class Prompts:
    """Return a new prompt for every request, so that no prefix is cached."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def token_ids(self, length: int) -> list[int]:
        return [self._rng.randrange(FIRST_ID, LAST_ID) for _ in range(length)]


def lines_of(model: str, num_lines: int, prompts: Prompts, sizes: Sizes) -> bytes:
    """Return an input file of completions with answers of one length."""
    body = {"model": model, "max_tokens": sizes.answer, "temperature": 0, "ignore_eos": True}
    return b"".join(
        to_json(
            {
                "custom_id": f"line-{number}",
                "method": "POST",
                "url": COMPLETIONS,
                "body": body | {"prompt": prompts.token_ids(sizes.prompt)},
            }
        )
        + b"\n"
        for number in range(num_lines)
    )


class Batches:
    """Batches of one gateway."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def upload(self, content: bytes) -> str:
        form = {"purpose": "batch"}
        answer = await self._http.post(
            "/v1/files", data=form, files={"file": ("lines.jsonl", content)}
        )
        file_id: str = answer.raise_for_status().json()["id"]
        return file_id

    async def begin(self, file_id: str, window: str = "24h") -> str:
        order = {"input_file_id": file_id, "endpoint": COMPLETIONS, "completion_window": window}
        answer = await self._http.post("/v1/batches", json=order)
        batch_id: str = answer.raise_for_status().json()["id"]
        return batch_id

    async def show(self, batch_id: str) -> dict[str, Any]:
        state: dict[str, Any] = (await self._http.get(f"/v1/batches/{batch_id}")).json()
        return state

    async def until(
        self, batch_id: str, is_reached: Callable[[dict[str, Any]], bool]
    ) -> dict[str, Any]:
        """Return the state of a batch when it has reached a state, or has ended."""
        while True:
            state = await self.show(batch_id)
            if is_reached(state) or state["status"] in ENDED:
                return state
            await asyncio.sleep(POLL_S)

    async def cancel(self, batch_id: str) -> None:
        await self._http.post(f"/v1/batches/{batch_id}/cancel")
        await self.until(batch_id, lambda _: False)

    async def num_tokens(self, batch_ids: Sequence[str]) -> int:
        """Return the tokens of all finished lines."""
        states = [await self.show(batch_id) for batch_id in batch_ids]
        return sum(state["usage"]["output_tokens"] for state in states)

    async def read(self, file_id: str) -> bytes:
        return (await self._http.get(f"/v1/files/{file_id}/content")).content


@contextlib.asynccontextmanager
async def batches_at(url: str) -> AsyncIterator[Batches]:
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        yield Batches(http)


# -- lines ----------------------------------------------------------------------------------------


async def measure_lines(num_lines: int) -> None:
    """Run a batch with a scripted model, and print the table."""
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        folder = Path(name)
        broker = EmbeddedServer(folder / "nats")
        broker.start()
        model = ScriptedModel(broker.url, lambda _request, _name: "An answer of some tokens.")
        processes = Processes(broker.url, folder / "workers.log")
        tree = {
            "models": {scripted_model.MODEL: {"path": str(DEMO_MODEL)}},
            "nats": {"unchecked": True},
            "batch": {"max_lines": 1_000_000},
        }
        config = write_config(tree, folder)
        bus = await Bus.connect(broker.url, "bench")
        try:
            await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
            model.start()
            await processes.start(
                {
                    role: worker_command(role, config=config, url=broker.url)
                    for role in ("gateway", "batcher")
                }
            )
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(_stand_for_engines(bus))
                (url,) = await processes.gateways()
                pids = {name: process.pid for name, process in processes.running.items()}
                pids["broker"] = int(broker.pid_file.read_text())
                async with batches_at(url) as batches:
                    await _run_lines(batches, pids, num_lines)
                beating.cancel()
        finally:
            await processes.stop()
            model.stop()
            await bus.close()
            broker.stop()


async def _stand_for_engines(bus: Bus) -> None:
    """Publish heartbeats of engines, so that as many lines are in flight as for real ones."""
    while True:
        for number in range(NUM_ENGINES):
            name = f"engine-{number}"
            beat = Heartbeat("engine", name, "bench", 0, [scripted_model.MODEL], {})
            await bus.heartbeats.publish(name, to_json(beat))
        await asyncio.sleep(BEAT_S)


async def _run_lines(batches: Batches, pids: dict[str, int], num_lines: int) -> None:
    content = lines_of(scripted_model.MODEL, num_lines, Prompts(), BULK)
    phases: dict[str, float] = {}
    before_s = {**processor_s(pids), "model and client": time.process_time()}
    phase_began_s = time.perf_counter()

    def end_phase(name: str) -> None:
        nonlocal phase_began_s
        phases[name] = time.perf_counter() - phase_began_s
        phase_began_s = time.perf_counter()

    file_id = await batches.upload(content)
    end_phase("upload")
    batch_id = await batches.begin(file_id)
    await batches.until(batch_id, lambda state: state["status"] != "validating")
    end_phase("check")
    run_before_s = {**processor_s(pids), "model and client": time.process_time()}
    state = await batches.until(batch_id, lambda _: False)
    end_phase("run")
    after_s = {**processor_s(pids), "model and client": time.process_time()}
    size = len(await batches.read(state["output_file_id"]))
    end_phase("download")
    if state["request_counts"]["completed"] != num_lines:
        raise RuntimeError(f"lines have failed: {state['request_counts']}")
    rows = [
        (name, f"{seconds:.2f}", f"{num_lines / seconds:,.0f}") for name, seconds in phases.items()
    ]
    title = f"a batch of {num_lines} lines of {len(content) / num_lines:.0f} bytes, results of"
    title += f" {size / num_lines:.0f} bytes"
    print_table(title, ("phase", "seconds", "lines/s"), rows)
    costs = [
        (
            name,
            f"{1000 * (run_before_s[name] - before_s[name]) / num_lines:.3f}",
            f"{1000 * (after_s[name] - run_before_s[name]) / num_lines:.3f}",
        )
        for name in before_s
    ]
    columns = ("process", "upload and check, ms/line", "run, ms/line")
    print_table("processor time", columns, costs)


# -- engine ---------------------------------------------------------------------------------------


def run_core(core: EngineCore, prompts: Prompts, num_seqs: int, num_requests: int) -> float:
    """Return the tokens a second of a core with `num_seqs` sequences at each time."""
    sampling = SamplingParams(temperature=0, max_tokens=BULK.answer, ignore_eos=True)
    first, last = (round(part * num_requests) for part in MIDDLE)
    num_added = num_ended = num_tokens = 0
    marks: list[tuple[float, int]] = []
    while num_ended < num_requests:
        while num_added < min(num_requests, num_ended + num_seqs):
            token_ids = prompts.token_ids(BULK.prompt)
            core.add(EngineRequest(f"core-{num_added}", token_ids, [], sampling, lane="batch"))
            num_added += 1
        for output in core.step():
            num_tokens += sum(len(choice.token_ids) for choice in output.choices)
            num_ended += output.usage is not None
        if num_ended >= (last if marks else first) and len(marks) < 2:
            marks.append((time.perf_counter(), num_tokens))
    return _rate(marks)


def _rate(marks: list[tuple[float, int]]) -> float:
    (began_s, first), (ended_s, last) = marks
    return (last - first) / (ended_s - began_s)


async def run_requests(bus: Bus, prompts: Prompts, num_open: int, num_requests: int) -> float:
    """Return the tokens a second of requests from a client, `num_open` at each time."""
    transport, ends_s = OverNats(bus), list[float]()
    left = iter(range(num_requests))

    async def follow_each() -> None:
        for _ in left:
            await transport(Prepared(Request(BULK.answer, prompts.token_ids(BULK.prompt))))
            ends_s.append(time.perf_counter())

    await asyncio.gather(*(follow_each() for _ in range(num_open)))
    first, last = (round(part * num_requests) for part in MIDDLE)
    return (last - first) * BULK.answer / (ends_s[last - 1] - ends_s[first - 1])


def _has_completed(state: dict[str, Any], number: int) -> bool:
    return bool(state["request_counts"]["completed"] >= number)


async def run_batch(batches: Batches, prompts: Prompts, num_requests: int) -> float:
    """Return the tokens a second of the middle of a batch."""
    file_id = await batches.upload(lines_of(MODEL, num_requests, prompts, BULK))
    batch_id = await batches.begin(file_id)
    marks: list[tuple[float, int]] = []
    for part in MIDDLE:
        number = round(part * num_requests)
        state = await batches.until(batch_id, partial(_has_completed, number=number))
        marks.append((time.perf_counter(), state["usage"]["output_tokens"]))
    await batches.until(batch_id, lambda _: False)
    return _rate(marks)


async def compare_engine(path: Path, rounds: int, num_requests: int) -> None:
    """Print the tokens a second of a core, of requests and of a batch, in turns."""
    tree, prompts = _tree(path), Prompts()
    rates = {name: Samples() for name in ("core", "requests", "batch")}
    config = _config_of(tree)
    core = build_core(load(config.models[MODEL], config.engine), config.engine)
    num_seqs = config.engine.max_num_seqs
    async with contextlib.AsyncExitStack() as stack:
        site = await stack.enter_async_context(deployment(tree, workers=_workers(config)))
        bus = await stack.enter_async_context(site.bus())
        batches = await stack.enter_async_context(batches_at(site.http))
        for number, name in in_turns([*rates], rounds, warm_ups=1):
            if name == "core":
                rate = await asyncio.to_thread(run_core, core, prompts, num_seqs, num_requests)
            elif name == "requests":
                rate = await run_requests(bus, prompts, 2 * num_seqs, num_requests)
            else:
                rate = await run_batch(batches, prompts, num_requests)
            if number >= 0:
                rates[name].append(rate)
    base = rates["core"].median
    rows = [
        (name, f"{each.median:,.0f}", f"{each.median / base:.3f}", f"{min(each):,.0f}")
        for name, each in rates.items()
    ]
    title = f"tokens of {num_requests} requests of {BULK.prompt} and {BULK.answer} tokens,"
    title += f" {num_seqs} sequences at once: medians of {rounds} rounds"
    print_table(title, ("", "tokens/s", "of the core", "smallest"), rows)


def _config_of(tree: dict[str, Any]) -> Config:
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        return settings.load_config(write_config(tree, Path(name)))


def _workers(config: Config) -> list[WorkerSpec]:
    return [*default_workers(config), WorkerSpec("gateway"), WorkerSpec("batcher")]


def _tree(path: Path) -> dict[str, Any]:
    tree = bench_tree(path, MAX_MODEL_LEN)
    return tree | {"engine": tree["engine"] | {"prefix_caching": False}}


# -- users ----------------------------------------------------------------------------------------


@dataclass
class Figures:
    """Figures of all rounds of one setup."""

    first_ms: Samples = field(default_factory=Samples)
    gap_ms: Samples = field(default_factory=Samples)
    num_tokens: int = 0
    """Tokens of batches."""
    elapsed_s: float = 0.0
    engine_s: float = 0.0
    """Processor seconds of the engine."""
    num_lines: int = 0
    num_answered: int = 0

    @property
    def rate(self) -> float:
        return self.num_tokens / self.elapsed_s


async def send_bursts(url: str, prompts: Prompts, figures: Figures, stop: asyncio.Event) -> None:
    """Send bursts of requests with pauses, until `stop` is set and all are answered."""
    transport, running = OverHttp(url), list[asyncio.Task[None]]()

    async def send() -> None:
        request = Request(USER.answer, prompts.token_ids(USER.prompt))
        times = await transport(Prepared(request))
        figures.first_ms.append(1000 * times.first_s)
        figures.gap_ms.extend(1000 * gap_s for gap_s in times.gaps_s)

    while not stop.is_set():
        running += [asyncio.create_task(send()) for _ in range(BURST)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), BURST_PERIOD_S)
    await asyncio.gather(*running)


class Users:
    """Turns of users alone, of batches alone, and of both."""

    def __init__(self, site: Deployment, batches: Batches, turn_s: float) -> None:
        self._site = site
        self._batches = batches
        self._turn_s = turn_s
        self._prompts = Prompts()

    async def turn(self, name: str, figures: Figures, num_lines: int) -> None:
        """Measure one turn. Each of the batches has `num_lines` lines."""
        stop = asyncio.Event()
        users = asyncio.create_task(asyncio.sleep(0))
        if name != "batches":
            work = send_bursts(self._site.http, self._prompts, figures, stop)
            users = asyncio.create_task(work)
        began_s, engine_before_s = time.perf_counter(), self._engine_s()
        if name == "users":
            await asyncio.sleep(self._turn_s)
        else:
            await self._run_batches(figures, num_lines)
        figures.elapsed_s += time.perf_counter() - began_s
        figures.engine_s += self._engine_s() - engine_before_s
        stop.set()
        await users

    async def _run_batches(self, figures: Figures, num_lines: int) -> None:
        window = f"{max(1, round(3 * self._turn_s / 60))}m"
        ids = []
        for _ in range(NUM_BATCHES):
            content = lines_of(MODEL, num_lines, self._prompts, BULK)
            ids.append(await self._batches.begin(await self._batches.upload(content), window))
        for batch_id in ids:
            state = await self._batches.until(batch_id, lambda _: False)
            figures.num_lines += state["request_counts"]["total"]
            figures.num_answered += state["request_counts"]["completed"]
        figures.num_tokens += await self._batches.num_tokens(ids)

    def _engine_s(self) -> float:
        return processor_s({"engine": self._site.pids("engine")[0]})["engine"]


async def compare_users(path: Path, rounds: int, turn_s: float) -> None:
    """Print the times of users alone and next to batches, and what the batches get."""
    tree, setups = _tree(path), ("users", "batches", "both")
    workers = _workers(_config_of(tree))
    figures = {name: Figures() for name in setups}
    async with deployment(tree, workers=workers) as site, batches_at(site.http) as batches:
        users = Users(site, batches, turn_s)
        warm_up = Figures()
        await users.turn("both", warm_up, 32)
        num_lines = max(32, round(warm_up.rate * turn_s / BULK.answer / NUM_BATCHES))
        for _, name in in_turns([*setups], rounds):
            await users.turn(name, figures[name], num_lines)
    _report_users(figures, rounds)


def _report_users(figures: dict[str, Figures], rounds: int) -> None:
    alone, bulk, both = figures["users"], figures["batches"], figures["both"]
    rows = []
    for name, each in figures.items():
        row = [name]
        for samples, base in ((each.first_ms, alone.first_ms), (each.gap_ms, alone.gap_ms)):
            row += _compared(samples, base) if samples else ["", ""]
        rows.append([*row, f"{each.rate:,.0f}" if each.num_tokens else ""])
    columns = ["", "first token p50 / p95 / p99, ms", "of alone", "gap p50 / p95 / p99, ms"]
    title = f"bursts of {BURST} requests every {BURST_PERIOD_S:g} s and {NUM_BATCHES} batches,"
    print_table(f"{title} {rounds} rounds", [*columns, "of alone", "batch tokens/s"], rows)
    # The part of the engine's time that users alone leave.
    idle = 1 - (alone.engine_s / alone.elapsed_s) / (bulk.engine_s / bulk.elapsed_s)
    part = both.rate / (bulk.rate * idle)
    lines = f"{both.num_answered} of {both.num_lines}"
    rows = [[f"{idle:.2f}", f"{part:.2f}", lines]]
    print_table("", ["idle with users alone", "batch of that", "lines in their window"], rows, 0)


def _compared(samples: Samples, base: Samples) -> list[str]:
    """Return the percentiles of samples, and their ratios to other samples."""
    values = [samples.median, samples.p95, samples.p99]
    ratios = [a / b for a, b in zip(values, (base.median, base.p95, base.p99), strict=True)]
    return [
        " / ".join(f"{value:.0f}" for value in values),
        " / ".join(f"{ratio:.2f}" for ratio in ratios),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"by default all of {', '.join(PARTS)}")
    parser.add_argument("--model", default=RANDOM_MODEL, help=f"a folder, or {RANDOM_MODEL}")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--lines", type=int, default=5000, help="lines for the scripted model")
    parser.add_argument("--requests", type=int, default=256, help="requests of each engine round")
    parser.add_argument("--seconds", type=float, default=30.0, help="time of each turn of users")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}")
    parts = options.parts or PARTS
    logs.configure_logging("warning", role="bench")
    with machine.alone(), tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        path = Path(options.model)
        if options.model == RANDOM_MODEL:
            path = Path(name)
            write_random_llama(path, DEMO_MODEL)
        if "lines" in parts:
            uvloop.run(measure_lines(options.lines))
        if "engine" in parts:
            uvloop.run(compare_engine(path.absolute(), options.rounds, options.requests))
        if "users" in parts:
            uvloop.run(compare_users(path.absolute(), options.rounds, options.seconds))


if __name__ == "__main__":
    main()
