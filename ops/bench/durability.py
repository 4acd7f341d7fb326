"""Measure what durability costs a stream of tokens: one engine, one set of prompts, four modes.

- direct: the engine's core, called in this process
- engine: tasks published to the engine's queue, answers read from the token log
- request: requests through coordinator and renderer to the engine, answers from the token log

The last two run with the token log on disk, where every record is synced before it is acknowledged,
and in memory. All modes take turns, so that a slow minute of the machine affects all of them. Time
to first token counts from publishing to the first token at the client.

On one machine the other processes take processor time that the engine would have elsewhere; the
table shows how much each has used for a thousand tokens.

    python -m ops.bench.durability [--model random-135m]

The demo model's step takes a millisecond and is all Python, so the cost of the log stands out;
`random-135m` has the shape of a small real model, and random weights.
"""

import argparse
import asyncio
import contextlib
import os
import random
import resource
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec
import torch
import uvloop
from rich.console import Console
from rich.table import Table

from ops.bench.models import write_random_llama
from ops.rendering import render
from shared.bus.bus import Bus
from shared.client import ask, follow, new_request_id
from shared.codec import envelope
from shared.config.schema import Config
from shared.protocol import subjects
from shared.protocol.records import Failure, LogRecord, TokenChunk
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, RequestTicket, Task, TaskHeader
from shared.telemetry import logs
from workers import settings
from workers.engine import loader
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest
from workers.engine.main import build_core
from workers.renderer.processing.processor import Processor
from workers.roles import default_workers
from workers.supervisor.cluster import LocalCluster

MODEL = "bench"
LOADS = (1, 8, 32)
STORAGES = ("file", "memory")
PROMPT_WORDS = 24
DEMO, RANDOM = "demo", "random-135m"
MAX_TOKENS = {DEMO: 256, RANDOM: 64}
TIMEOUT_S = 300.0


@dataclass(slots=True)
class Run:
    """One burst of requests; each mode has several."""

    ttft_ms: list[float] = field(default_factory=list)
    num_tokens: int = 0
    num_records: int = 0
    took_s: float = 0.0
    cpu_s: dict[str, float] = field(default_factory=dict)
    """Processor seconds during the burst, by process."""


class Prompts:
    """Return new prompts of one length for every request, so that no prefix is cached."""

    def __init__(self, config: Config, max_tokens: int) -> None:
        self.sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._rng = random.Random(0)
        self._processor = Processor(config.models[MODEL])

    def messages(self) -> list[Message]:
        words = (str(self._rng.randrange(100, 1000)) for _ in range(PROMPT_WORDS))
        return [Message("user", " ".join(words))]

    def token_ids(self) -> list[int]:
        return render(self._processor, self.messages(), []).prompt_token_ids


# -- the modes ------------------------------------------------------------------------------------


def run_direct(core: EngineCore, prompts: Prompts, load: int) -> Run:
    run = Run()
    requests = [
        EngineRequest(new_request_id(), prompts.token_ids(), [], prompts.sampling)
        for _ in range(load)
    ]
    began_s = time.perf_counter()
    seen: set[str] = set()
    with _timed(run, {}):
        for request in requests:
            core.add(request)
        while core.has_work:
            for output in core.step():
                if output.request_id not in seen:
                    seen.add(output.request_id)
                    run.ttft_ms.append(1000 * (time.perf_counter() - began_s))
                run.num_tokens += sum(len(choice.token_ids) for choice in output.choices)
                run.num_records += 1
    return run


Road = Callable[["Site", Prompts], AsyncIterator[LogRecord]]


async def through_engine(site: "Site", prompts: Prompts) -> AsyncIterator[LogRecord]:
    request_id = new_request_id()
    publishing = asyncio.create_task(
        publish_task(site.bus, request_id, prompts.token_ids(), prompts.sampling)
    )
    async for record in follow(site.bus, request_id):
        yield record
    await publishing


async def publish_task(
    bus: Bus, request_id: str, token_ids: list[int], sampling: SamplingParams
) -> None:
    """Publish a task to the engine as a renderer does."""
    now_ms = bus.now_ms()
    # No request is queued that would be acknowledged at the end.
    ticket = RequestTicket(now_ms, now_ms + 1000 * TIMEOUT_S, 1, f"bench.receipt.{request_id}")
    header = TaskHeader(request_id, MODEL, "interactive", ticket, sampling)
    task = Task(header, EngineBody(token_ids, []))
    subject = subjects.stage("engine", MODEL, "interactive", request_id)
    await bus.publish(subject, envelope.encode(task, []), f"{request_id}:engine")


async def through_all(site: "Site", prompts: Prompts) -> AsyncIterator[LogRecord]:
    request = GenerateRequest(MODEL, prompts.messages(), prompts.sampling)
    async for record in ask(site.bus, request, new_request_id()):
        yield record


@dataclass(frozen=True, slots=True)
class Site:
    """Run a cluster; yield a client's connection to it."""

    bus: Bus
    pids: dict[str, int]


async def run_road(transport: Road, site: Site, prompts: Prompts, load: int) -> Run:
    run = Run()

    async def follow_one() -> None:
        began_s = time.perf_counter()
        first = True
        async for record in transport(site, prompts):
            match record:
                case TokenChunk():
                    if first:
                        run.ttft_ms.append(1000 * (time.perf_counter() - began_s))
                    first = False
                    run.num_tokens += sum(len(choice.token_ids) for choice in record.choices)
                    run.num_records += 1
                case Failure():
                    raise RuntimeError(record.error.message)

    with _timed(run, site.pids):
        await asyncio.gather(*(follow_one() for _ in range(load)))
    return run


@contextlib.contextmanager
def _timed(run: Run, pids: dict[str, int]) -> Iterator[None]:
    began_s, used_s = time.perf_counter(), _cpu_s(pids)
    yield
    run.took_s = time.perf_counter() - began_s
    run.cpu_s = {name: now_s - used_s[name] for name, now_s in _cpu_s(pids).items()}


def _cpu_s(pids: dict[str, int]) -> dict[str, float]:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {name: _cpu_of_s(pid) for name, pid in pids.items()} | {
        "client": used.ru_utime + used.ru_stime
    }


def _cpu_of_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    # These are utime and stime, fields 14 and 15 of proc(5); the first two are cut off here.
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the report ------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def cluster(config: Config, config_file: Path, storage: str) -> AsyncIterator[Site]:
    # The workers read the configuration for themselves.
    os.environ["PAGEMILL_DELIVERY__TOKEN_LOG_STORAGE"] = storage
    # The server's limit for streams in memory is smaller than that for streams on disk.
    os.environ["PAGEMILL_DELIVERY__MAX_TOKEN_LOG_MIB"] = "128"
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        nats = msgspec.structs.replace(config.nats, port=0, store_dir=folder)
        config = msgspec.structs.replace(config, nats=nats)
        log_file = Path(folder) / "workers.log"
        local = LocalCluster(config, config_file, default_workers(config), log_file=log_file)
        try:
            await local.start()
            bus = await Bus.connect(local.url, "bench")
            broker = int((Path(folder) / "nats-server.pid").read_text())
            pids = {role: local.pids(role)[0] for role in ("engine", "renderer", "coordinator")}
            yield Site(bus, {"broker": broker, **pids})
            await bus.close()
        finally:
            await local.stop()


async def main(model: str, rounds: int) -> None:
    logs.configure_logging("warning", role="bench")
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        file = Path(folder) / "pagemill.yaml"
        if model == DEMO:
            path, dtype = settings.DEMO_MODEL, "float32"
        else:
            path, dtype = Path(folder) / "model", "bfloat16"
            write_random_llama(path, settings.DEMO_MODEL)
        tree = {"models": {MODEL: {"path": str(path), "dtype": dtype}}}
        file.write_bytes(msgspec.json.encode(tree))
        await compare(file, MAX_TOKENS[model], rounds)


async def compare(config_file: Path, max_tokens: int, rounds: int) -> None:
    config = settings.load_config(config_file)
    prompts = Prompts(config, max_tokens)
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    core = build_core(loader.load(config.models[MODEL], config.engine), config.engine)
    runs: dict[tuple[int, str], list[Run]] = {}
    async with contextlib.AsyncExitStack() as stack:
        sites = {
            storage: await stack.enter_async_context(cluster(config, config_file, storage))
            for storage in STORAGES
        }
        modes: dict[str, Callable[[int], Awaitable[Run]]] = {
            "direct": lambda load: asyncio.to_thread(run_direct, core, prompts, load)
        }
        for name, transport in (("engine", through_engine), ("request", through_all)):
            for storage, site in sites.items():
                modes[f"{name}, log in {storage}"] = _mode(transport, site, prompts)
        # The first round compiles and fills caches.
        for number in range(-1, rounds):
            for load in LOADS:
                for name, mode in modes.items():
                    run = await mode(load)
                    if number >= 0:
                        runs.setdefault((load, name), []).append(run)
    console = Console()
    for load in LOADS:
        title = f"{load} in flight, {max_tokens} tokens each: medians of {rounds} bursts"
        console.print(_table(title, {name: runs[load, name] for name in modes}))


def _mode(transport: Road, site: Site, prompts: Prompts) -> Callable[[int], Awaitable[Run]]:
    return lambda load: run_road(transport, site, prompts, load)


def _table(title: str, modes: dict[str, list[Run]]) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("transport")
    for name in ("tokens/s", "of direct", "TTFT ms", "more", "tokens/record"):
        table.add_column(name, justify="right")
    table.add_column("CPU ms for 1000 tokens: engine, broker, client, others")
    direct_tokens_s, direct_ttft_ms = _tokens_s(modes["direct"]), _ttft_ms(modes["direct"])
    for name, runs in modes.items():
        tokens_s, ttft_ms = _tokens_s(runs), _ttft_ms(runs)
        num_tokens = sum(run.num_tokens for run in runs)
        table.add_row(
            name,
            f"{tokens_s:,.0f}",
            f"{tokens_s / direct_tokens_s:.2f}",
            f"{ttft_ms:.1f}",
            f"{ttft_ms - direct_ttft_ms:+.1f}",
            f"{num_tokens / sum(run.num_records for run in runs):.1f}",
            ", ".join(f"{1e6 * s / num_tokens:.0f}" for s in _cpu_shares(runs)),
        )
    return table


def _cpu_shares(runs: list[Run]) -> list[float]:
    """Return the seconds of engine, broker, client and the rest; a direct call is all engine."""
    total = {name: sum(run.cpu_s[name] for run in runs) for name in runs[0].cpu_s}
    if "engine" not in total:
        return [total["client"]]
    first = [total.pop(name) for name in ("engine", "broker", "client")]
    return [*first, sum(total.values())]


def _tokens_s(runs: list[Run]) -> float:
    return statistics.median(run.num_tokens / run.took_s for run in runs)


def _ttft_ms(runs: list[Run]) -> float:
    return statistics.median(ms for run in runs for ms in run.ttft_ms)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(DEMO, RANDOM), default=DEMO)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    uvloop.run(main(given.model, given.rounds))
