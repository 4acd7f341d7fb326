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
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import torch
import uvloop

from ops.bench import burst
from ops.bench.burst import Burst
from ops.bench.models import write_random_llama
from ops.harness.deployment import Deployment, deployment
from ops.harness.samples import in_turns
from ops.harness.tables import print_table
from ops.rendering import render
from shared.bus.bus import Bus
from shared.client import ask, follow, new_request_id
from shared.codec import envelope
from shared.config.schema import EngineConfig, ModelConfig
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

MODEL = "bench"
LOADS = (1, 8, 32)
STORAGES = ("file", "memory")
PROMPT_WORDS = 24
DEMO, RANDOM = "demo", "random-135m"
MAX_TOKENS = {DEMO: 256, RANDOM: 64}
TIMEOUT_S = 300.0
COLUMNS = ("transport", "tokens/s", "of direct", "TTFT ms", "more", "tokens/record")


class Prompts:
    """Return new prompts of one length for every request, so that no prefix is cached."""

    def __init__(self, model: ModelConfig, max_tokens: int) -> None:
        self.sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        self._rng = random.Random(0)
        self._processor = Processor(model)

    def messages(self) -> list[Message]:
        words = (str(self._rng.randrange(100, 1000)) for _ in range(PROMPT_WORDS))
        return [Message("user", " ".join(words))]

    def token_ids(self) -> list[int]:
        return render(self._processor, self.messages(), []).prompt_token_ids


# -- the modes ------------------------------------------------------------------------------------


async def run_direct(core: EngineCore, prompts: Prompts, load: int) -> Burst:
    return await asyncio.to_thread(_run_direct, core, prompts, load)


def _run_direct(core: EngineCore, prompts: Prompts, load: int) -> Burst:
    run = Burst()
    requests = [
        EngineRequest(new_request_id(), prompts.token_ids(), [], prompts.sampling)
        for _ in range(load)
    ]
    began_s = time.perf_counter()
    started: set[str] = set()
    with run.timed({}):
        for request in requests:
            core.add(request)
        while core.has_work:
            for output in core.step():
                if output.request_id not in started:
                    started.add(output.request_id)
                    run.first_s.append(time.perf_counter() - began_s)
                run.num_tokens += sum(len(choice.token_ids) for choice in output.choices)
                run.num_records += 1
    return run


Transport = Callable[[Bus, Prompts], AsyncIterator[LogRecord]]


async def through_engine(bus: Bus, prompts: Prompts) -> AsyncIterator[LogRecord]:
    request_id = new_request_id()
    publishing = asyncio.create_task(
        publish_task(bus, request_id, prompts.token_ids(), prompts.sampling)
    )
    async for record in follow(bus, request_id):
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


async def through_all(bus: Bus, prompts: Prompts) -> AsyncIterator[LogRecord]:
    request = GenerateRequest(MODEL, prompts.messages(), prompts.sampling)
    async for record in ask(bus, request, new_request_id()):
        yield record


async def run_transport(
    transport: Transport, site: Deployment, bus: Bus, prompts: Prompts, load: int
) -> Burst:
    run = Burst()

    async def follow_one() -> None:
        began_s = time.perf_counter()
        first_s = 0.0
        async for record in transport(bus, prompts):
            match record:
                case TokenChunk():
                    first_s = first_s or time.perf_counter() - began_s
                    run.num_tokens += sum(len(choice.token_ids) for choice in record.choices)
                    run.num_records += 1
                case Failure():
                    raise RuntimeError(record.error.message)
        run.first_s.append(first_s)

    with run.timed(site.processes()):
        await asyncio.gather(*(follow_one() for _ in range(load)))
    return run


# -- the report ------------------------------------------------------------------------------------


def model_of(name: str, folder: Path) -> ModelConfig:
    if name == DEMO:
        return ModelConfig(str(settings.DEMO_MODEL), dtype="float32")
    write_random_llama(folder / "model", settings.DEMO_MODEL)
    return ModelConfig(str(folder / "model"), dtype="bfloat16")


async def compare(model: ModelConfig, max_tokens: int, rounds: int) -> None:
    engine = EngineConfig()
    prompts = Prompts(model, max_tokens)
    if engine.threads:
        torch.set_num_threads(engine.threads)
    modes = {"direct": partial(run_direct, build_core(loader.load(model, engine), engine), prompts)}
    async with contextlib.AsyncExitStack() as stack:
        sites = {}
        for storage in STORAGES:
            # The server's limit for streams in memory is smaller than that for streams on disk.
            delivery = {"token_log_storage": storage, "max_token_log_mib": 128}
            tree = {"models": {MODEL: model}, "delivery": delivery}
            site = await stack.enter_async_context(deployment(tree, gateway=False))
            sites[storage] = site, await stack.enter_async_context(site.bus())
        for name, transport in (("engine", through_engine), ("request", through_all)):
            for storage, pair in sites.items():
                mode = partial(run_transport, transport, *pair, prompts)
                modes[f"{name}, log in {storage}"] = mode
        runs: dict[tuple[int, str], list[Burst]] = {}
        setups = [(load, name) for load in LOADS for name in modes]
        # The first round compiles and fills caches.
        for number, (load, name) in in_turns(setups, rounds, warm_ups=1):
            run = await modes[name](load)
            if number >= 0:
                runs.setdefault((load, name), []).append(run)
    for load in LOADS:
        title = f"{load} in flight, {max_tokens} tokens each: medians of {rounds} bursts"
        columns = (*COLUMNS, "CPU ms for 1000 tokens")
        print_table(title, columns, _rows({name: runs[load, name] for name in modes}))


def _rows(modes: dict[str, list[Burst]]) -> list[tuple[str, ...]]:
    direct_ms = burst.first_ms(modes["direct"]).median
    return [
        (
            name,
            f"{burst.tokens_s(runs):,.0f}",
            f"{burst.tokens_s(runs) / burst.tokens_s(modes['direct']):.2f}",
            f"{burst.first_ms(runs).median:.1f}",
            f"{burst.first_ms(runs).median - direct_ms:+.1f}",
            f"{sum(r.num_tokens for r in runs) / sum(r.num_records for r in runs):.1f}",
            burst.processor_ms(runs),
        )
        for name, runs in modes.items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=(DEMO, RANDOM), default=DEMO, help="the served model")
    parser.add_argument("--rounds", type=int, default=5, help="bursts of each mode and load")
    options = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        model = model_of(options.model, Path(folder))
        uvloop.run(compare(model, MAX_TOKENS[options.model], options.rounds))


if __name__ == "__main__":
    main()
