"""Measure batches: lines a second, what a batch costs an engine, and users next to batches.

- lines: a scripted model, which computes nothing. The table has the time of each phase, and the
  processor time of each process for a line
- long: a batch of a million lines with the scripted model, which is cancelled while it runs. The
  table has the time of each phase, and the largest memory of each process so far
- engine: tokens a second of a batch, compared with the same requests from a client of the bus, and
  with the core of the engine alone, always with as many sequences as it computes at once
- users: bursts of short requests over HTTP, alone and next to batches that never run dry. The batch
  is compared with a batch alone in the time in which the users leave the engine idle. If vLLM is
  installed in the folder of --peers, it takes turns: its scheduler prefers the users by their
  priority, and its batch is a client with as many requests in flight as a batcher has

    python -m ops.bench.batches [lines] [long] [engine] [users] [--peers FOLDER] [--model FOLDER]

The model is by default a random one in the shape of SmolLM2-135M. Every figure is also printed as
soon as it is measured.
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
from itertools import pairwise
from operator import iadd
from pathlib import Path
from typing import Any, Protocol

import httpx
import uvloop

from ops.bench.gateway.transports import OverHttp, OverNats, Prepared
from ops.bench.models import VOCAB_SIZE, write_random_llama, write_tokenizer
from ops.bench.peers.protocol import Request
from ops.bench.servers import MODEL, bench_tree, vllm_if_installed
from ops.chaos.agents import scripted_model
from ops.chaos.agents.scripted_model import ScriptedModel
from ops.harness import machine
from ops.harness.deployment import Deployment, deployment, write_config
from ops.harness.machine import processor_s
from ops.harness.processes import Processes, worker_command
from ops.harness.samples import Samples, in_turns
from ops.harness.tables import console, print_table
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

PARTS = ("lines", "long", "engine", "users")
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
MIN_WAVES = 4
"""Times that all sequences of an engine end."""
BURST, BURST_PERIOD_S = 4, 3.0
NUM_BATCHES = 2
PAGEMILL, VLLM = "pagemill", "vllm"
USERS, BATCHES, BOTH = "users", "batches", "both"
# vLLM prefers requests with a smaller number.
USER_PRIORITY, BATCH_PRIORITY = 0, 1


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

    async def read(self, file_id: str) -> int:
        """Read a file, and return its size."""
        num_bytes = 0
        async with self._http.stream("GET", f"/v1/files/{file_id}/content") as answer:
            async for data in answer.aiter_bytes():
                num_bytes += len(data)
        return num_bytes


@contextlib.asynccontextmanager
async def batches_at(url: str) -> AsyncIterator[Batches]:
    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http:
        yield Batches(http)


# -- lines ----------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def scripted() -> AsyncIterator[tuple[Batches, dict[str, int]]]:
    """Run a gateway and a batcher with a scripted model. Yield the process ids, too."""
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
            commands = {
                role: worker_command(role, config=config, url=broker.url)
                for role in ("gateway", "batcher")
            }
            await processes.start(commands)
            async with asyncio.TaskGroup() as group:
                beating = group.create_task(_stand_for_engines(bus))
                (url,) = await processes.gateways()
                pids = {name: process.pid for name, process in processes.running.items()}
                pids["broker"] = int(broker.pid_file.read_text())
                async with batches_at(url) as batches:
                    yield batches, pids
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


class Phases:
    """Phases of a batch, each with its time and the state of the processes at its end."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.seconds: dict[str, float] = {}
        self.processor_s = [self._processor_s(pids)]
        self.peak_mib: list[list[float]] = []
        self._pids = pids
        self._began_s = time.perf_counter()

    def end(self, name: str) -> None:
        self.seconds[name] = time.perf_counter() - self._began_s
        self.processor_s.append(self._processor_s(self._pids))
        self.peak_mib.append([machine.peak_bytes(pid) / 2**20 for pid in self._pids.values()])
        console.print(f"{name}: {self.seconds[name]:.2f} s")
        self._began_s = time.perf_counter()

    def _processor_s(self, pids: dict[str, int]) -> dict[str, float]:
        return {**processor_s(pids), "model and client": time.process_time()}

    async def run_until_running(self, batches: Batches, content: bytes) -> str:
        """Upload a file, and begin its batch. Return the batch's id when its lines run."""
        file_id = await batches.upload(content)
        self.end("upload")
        batch_id = await batches.begin(file_id)
        await batches.until(batch_id, lambda state: state["status"] != "validating")
        self.end("check")
        return batch_id


async def measure_lines(num_lines: int) -> None:
    """Run a batch with a scripted model, and print its times."""
    async with scripted() as (batches, pids):
        content = lines_of(scripted_model.MODEL, num_lines, Prompts(), BULK)
        phases = Phases(pids)
        batch_id = await phases.run_until_running(batches, content)
        state = await batches.until(batch_id, lambda _: False)
        phases.end("run")
        size = await batches.read(state["output_file_id"])
        phases.end("download")
    if state["request_counts"]["completed"] != num_lines:
        raise RuntimeError(f"lines have failed: {state['request_counts']}")
    rows = [
        (name, f"{seconds:.2f}", f"{num_lines / seconds:,.0f}")
        for name, seconds in phases.seconds.items()
    ]
    title = f"a batch of {num_lines} lines of {len(content) / num_lines:.0f} bytes, results of"
    title += f" {size / num_lines:.0f} bytes"
    print_table(title, ("phase", "seconds", "lines/s"), rows)
    begun, _, checked, ended, _ = phases.processor_s
    costs = [
        (
            name,
            f"{1000 * (checked[name] - begun[name]) / num_lines:.3f}",
            f"{1000 * (ended[name] - checked[name]) / num_lines:.3f}",
        )
        for name in begun
    ]
    columns = ("process", "upload and check, ms/line", "run, ms/line")
    print_table("processor time", columns, costs)


# -- long -----------------------------------------------------------------------------------------


def short_lines(num_lines: int) -> bytes:
    """Return an input file whose lines have about 140 bytes."""
    body = b'{"model":"%b","prompt":"line %%d","max_tokens":8}' % scripted_model.MODEL.encode()
    line = b'{"custom_id":"line-%%d","method":"POST","url":"%b","body":%b}\n'
    line %= (COMPLETIONS.encode(), body)
    return b"".join(line % (number, number) for number in range(num_lines))


async def measure_long(num_lines: int, run_s: float) -> None:
    """Begin a batch of many lines, cancel it after some time, and print its times and memory."""
    async with scripted() as (batches, pids):
        phases = Phases(pids)
        phases.end("start")
        content = short_lines(num_lines)
        phases.end("make the file")
        batch_id = await phases.run_until_running(batches, content)
        await asyncio.sleep(run_s)
        phases.end("run")
        await batches.cancel(batch_id)
        phases.end("cancel")
        state = await batches.show(batch_id)
        await batches.read(state["error_file_id"])
        phases.end("download")
    counts = state["request_counts"]
    if counts["completed"] + counts["failed"] != num_lines or not counts["completed"]:
        raise RuntimeError(f"lines have no result: {counts}")
    rows = [
        (name, f"{seconds:.2f}", *(f"{mib:.0f}" for mib in peaks))
        for (name, seconds), peaks in zip(phases.seconds.items(), phases.peak_mib, strict=True)
    ]
    title = f"a batch of {num_lines} lines in {len(content) / 2**20:.0f} MiB, cancelled after"
    title += f" {counts['completed']} answers"
    columns = ("phase", "seconds", *(f"{name}, MiB" for name in pids))
    print_table(title, columns, rows)
    costs = [
        (phase, *(f"{after[name] - before[name]:.2f}" for name in after))
        for phase, (before, after) in zip(phases.seconds, pairwise(phases.processor_s), strict=True)
    ]
    print_table("processor time, s", ("phase", *phases.processor_s[0]), costs)


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
    # Equal requests end together, so fewer have no middle.
    num_requests = max(num_requests, MIN_WAVES * num_seqs)
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
            console.print(f"round {number}, {name}: {rate:,.0f} tokens/s")
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

    def add(self, turn: "Figures") -> None:
        for name in self.__dataclass_fields__:
            setattr(self, name, iadd(getattr(self, name), getattr(turn, name)))


class Server(Protocol):
    """A server with users and batches."""

    url: str

    async def run_batches(self, num_lines: int, window_s: float, figures: Figures) -> None:
        """Run NUM_BATCHES batches of `num_lines` lines, and count them in `figures`."""

    def engine_s(self) -> float:
        """Return the processor seconds of the engine so far."""


class Pagemill:
    def __init__(self, site: Deployment, batches: Batches, prompts: Prompts) -> None:
        self.url = site.http
        self._site, self._batches, self._prompts = site, batches, prompts

    async def run_batches(self, num_lines: int, window_s: float, figures: Figures) -> None:
        window, ids = f"{max(1, round(window_s / 60))}m", list[str]()
        for _ in range(NUM_BATCHES):
            content = lines_of(MODEL, num_lines, self._prompts, BULK)
            ids.append(await self._batches.begin(await self._batches.upload(content), window))
        for batch_id in ids:
            state = await self._batches.until(batch_id, lambda _: False)
            figures.num_lines += state["request_counts"]["total"]
            figures.num_answered += state["request_counts"]["completed"]
        figures.num_tokens += await self._batches.num_tokens(ids)

    def engine_s(self) -> float:
        return processor_s({"engine": self._site.pids("engine")[0]})["engine"]


class Vllm:
    """vLLM's server. It has no batches: a client keeps their requests in flight."""

    def __init__(self, url: str, num_open: int, prompts: Prompts) -> None:
        self.url = url
        self._num_open, self._prompts = num_open, prompts

    async def run_batches(self, num_lines: int, window_s: float, figures: Figures) -> None:
        transport, left = OverHttp(self.url), iter(range(NUM_BATCHES * num_lines))
        fields = {"priority": BATCH_PRIORITY}

        async def follow_each() -> None:
            for _ in left:
                request = Request(BULK.answer, self._prompts.token_ids(BULK.prompt))
                await transport(Prepared(request, fields=fields))
                figures.num_tokens += BULK.answer

        await asyncio.gather(*(follow_each() for _ in range(self._num_open)))

    def engine_s(self) -> float:
        return 0.0


async def send_bursts(
    server: Server, prompts: Prompts, figures: Figures, stop: asyncio.Event
) -> None:
    """Send bursts of requests with pauses, until `stop` is set and all are answered."""
    transport, running = OverHttp(server.url), list[asyncio.Task[None]]()
    fields = {"priority": USER_PRIORITY} if isinstance(server, Vllm) else {}

    async def send() -> None:
        request = Request(USER.answer, prompts.token_ids(USER.prompt))
        times = await transport(Prepared(request, fields=fields))
        figures.first_ms.append(1000 * times.first_s)
        figures.gap_ms.extend(1000 * gap_s for gap_s in times.gaps_s)

    while not stop.is_set():
        running += [asyncio.create_task(send()) for _ in range(BURST)]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), BURST_PERIOD_S)
    await asyncio.gather(*running)


@dataclass
class Users:
    """Turns of users alone, of batches alone, and of both."""

    server: Server
    turn_s: float
    prompts: Prompts

    async def turn(self, name: str, figures: Figures, num_lines: int) -> None:
        """Measure one turn. Each of the batches has `num_lines` lines."""
        stop, sending = asyncio.Event(), None
        if name != BATCHES:
            work = send_bursts(self.server, self.prompts, figures, stop)
            sending = asyncio.create_task(work)
        began_s, engine_before_s = time.perf_counter(), self.server.engine_s()
        if name == USERS:
            await asyncio.sleep(self.turn_s)
        else:
            await self.server.run_batches(num_lines, 3 * self.turn_s, figures)
        figures.elapsed_s += time.perf_counter() - began_s
        figures.engine_s += self.server.engine_s() - engine_before_s
        stop.set()
        if sending is not None:
            await sending

    async def num_lines(self) -> int:
        """Warm up, and return the lines of each batch for one turn."""
        warm_up = Figures()
        await self.turn(BOTH, warm_up, 32)
        return max(32, round(warm_up.rate * self.turn_s / BULK.answer / NUM_BATCHES))


async def compare_users(path: Path, rounds: int, turn_s: float, vllm_url: str | None) -> None:
    """Print the times of users alone and next to batches, and what the batches get."""
    tree, prompts = _tree(path), Prompts()
    config = _config_of(tree)
    async with (
        deployment(tree, workers=_workers(config)) as site,
        batches_at(site.http) as batches,
    ):
        servers: dict[str, Server] = {PAGEMILL: Pagemill(site, batches, prompts)}
        if vllm_url is not None:
            servers[VLLM] = Vllm(vllm_url, 2 * config.engine.max_num_seqs, prompts)
        users = {name: Users(server, turn_s, prompts) for name, server in servers.items()}
        num_lines = {name: await each.num_lines() for name, each in users.items()}
        setups = [(server, name) for server in servers for name in (USERS, BATCHES, BOTH)]
        figures = {setup: Figures() for setup in setups}
        for number, (server, name) in in_turns(setups, rounds):
            turn = Figures()
            await users[server].turn(name, turn, num_lines[server])
            console.print(f"round {number}, {server}, {name}: {_summary(turn)}")
            figures[server, name].add(turn)
    _report_users(figures, rounds)


def _summary(turn: Figures) -> str:
    words = []
    if turn.first_ms:
        words.append(f"first token {_percentiles(turn.first_ms)} ms")
        words.append(f"gap {_percentiles(turn.gap_ms)} ms")
    if turn.num_tokens:
        words.append(f"batch {turn.rate:,.0f} tokens/s")
    return ", ".join(words)


def _report_users(figures: dict[tuple[str, str], Figures], rounds: int) -> None:
    rows = []
    for (server, name), each in figures.items():
        alone, bulk = figures[server, USERS], figures[server, BATCHES]
        row = [server, name]
        for samples, base in ((each.first_ms, alone.first_ms), (each.gap_ms, alone.gap_ms)):
            row += [_percentiles(samples), _ratios(samples, base)] if samples else ["", ""]
        row += [f"{each.rate:,.0f}", f"{each.rate / bulk.rate:.2f}"] if each.num_tokens else []
        rows.append(row)
    columns = ["", "", "first token p50 / p95 / p99, ms", "of alone"]
    columns += ["gap p50 / p95 / p99, ms", "of alone", "batch tokens/s", "of alone"]
    title = f"bursts of {BURST} requests every {BURST_PERIOD_S:g} s and {NUM_BATCHES} batches,"
    print_table(f"{title} {rounds} rounds", columns, rows, num_texts=2)
    alone, bulk, both = (figures[PAGEMILL, name] for name in (USERS, BATCHES, BOTH))
    # The part of the engine's time that users alone leave.
    idle = 1 - (alone.engine_s / alone.elapsed_s) / (bulk.engine_s / bulk.elapsed_s)
    part = both.rate / (bulk.rate * idle)
    lines = f"{both.num_answered} of {both.num_lines}"
    rows = [[f"{idle:.2f}", f"{part:.2f}", lines]]
    columns = ["idle with users alone", "batch of that", "lines in their window"]
    print_table(PAGEMILL, columns, rows, num_texts=0)


def _percentiles(samples: Samples) -> str:
    return " / ".join(f"{value:.0f}" for value in _values(samples))


def _ratios(samples: Samples, base: Samples) -> str:
    pairs = zip(_values(samples), _values(base), strict=True)
    return " / ".join(f"{value / before:.2f}" for value, before in pairs)


def _values(samples: Samples) -> list[float]:
    return [samples.median, samples.p95, samples.p99]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", help=f"by default all of {', '.join(PARTS)}")
    parser.add_argument("--model", default=RANDOM_MODEL, help=f"a folder, or {RANDOM_MODEL}")
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="folder with vLLM")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--lines", type=int, default=5000, help="lines of the batch that ends")
    parser.add_argument("--long", type=int, default=1_000_000, help="lines of the long batch")
    parser.add_argument("--requests", type=int, default=256, help="requests of each engine round")
    parser.add_argument("--seconds", type=float, default=25.0, help="time of each turn of users")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"there are no parts {', '.join(sorted(unknown))}")
    logs.configure_logging("warning", role="bench")
    with machine.alone(), tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        folder = Path(name)
        path = Path(options.model).absolute()
        if options.model == RANDOM_MODEL:
            path = folder / RANDOM_MODEL
            write_random_llama(path, DEMO_MODEL)
            # Every token needs a text, because an event of a stream has a text.
            write_tokenizer(path, VOCAB_SIZE)
        for part in options.parts or PARTS:
            began_s = time.perf_counter()
            _run(part, path, folder, options)
            console.print(f"{part} took {time.perf_counter() - began_s:.0f} s\n")


def _run(part: str, path: Path, folder: Path, options: argparse.Namespace) -> None:
    if part == "lines":
        uvloop.run(measure_lines(options.lines))
    elif part == "long":
        uvloop.run(measure_long(options.long, options.seconds))
    elif part == "engine":
        uvloop.run(compare_engine(path, options.rounds, options.requests))
    else:
        peers = options.peers.absolute()
        with vllm_if_installed(peers, folder, str(path), _vllm_options(path)) as url:
            if url is None:
                console.print(f"without vLLM, which is not installed in {peers}")
            uvloop.run(compare_users(path, options.rounds, options.seconds, url))


def _vllm_options(path: Path) -> list[str]:
    """Return the settings of `_tree` for vLLM, with priorities."""
    tree = _tree(path)
    model, engine = tree["models"][MODEL], tree["engine"]
    options = ["--dtype", model["dtype"], "--max-model-len", str(model["max_model_len"])]
    options += ["--max-num-seqs", str(engine["max_num_seqs"]), "--no-enable-prefix-caching"]
    return [*options, "--scheduling-policy", "priority"]


if __name__ == "__main__":
    main()
