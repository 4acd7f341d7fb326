"""A run of the demo model with two engines, whose steps are measured."""

import asyncio
import contextlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from ops.simulate.engine import Cost
from ops.simulate.fit.fitting import Answer, Step, compare, explained, fit_cost, overhead_s
from ops.simulate.fit.trace import MAX_PROMPT, Turn, alone, chats
from shared.bus.bus import Bus
from shared.bus.embedded_server import end_with_parent
from shared.client import ask, new_request_id
from shared.protocol.records import Finish, TokenChunk
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from workers.cli import settings
from workers.cli.local_cluster import LocalCluster, Process
from workers.roles import WorkerSpec, default_workers

ROOT = Path(__file__).parents[3]
NUM_ENGINES = 2
NUM_ALONE = 15
MAX_LATE_S = 1.0
BLOCK = 16
LIMITS = Cost(max_seqs=16, step_tokens=512, kv_tokens=4096 * BLOCK)
CONFIG = f"""
models:
  demo:
    path: {ROOT / "ops" / "demo_model"}
    max_model_len: {MAX_PROMPT + 200}
engine:
  threads: 1
  block_size: {BLOCK}
  num_blocks: {LIMITS.kv_tokens // BLOCK}
  max_num_seqs: {LIMITS.max_seqs}
  max_num_batched_tokens: {LIMITS.step_tokens}
log_level: warning
"""


class TimedCluster(LocalCluster):
    """A local cluster whose engines write down their steps."""

    async def _spawn(self, spec: WorkerSpec) -> Process:
        if spec.role != "engine":
            return await super()._spawn(spec)
        arguments = ["worker", spec.role, "--nats", self.url, f"--model={spec.model}"]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "ops.simulate.fit.timed_worker", *arguments),
            *("--config", str(self._config_file)),
            cwd=ROOT,
            env={**os.environ, "FIT_STEPS": str(self._store_dir)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


async def measure(
    turns: Sequence[Turn], lone: Sequence[Turn]
) -> tuple[list[Answer], list[Answer], list[Step]]:
    """Run the requests; return the answers, those of the lone requests, and all steps."""
    with tempfile.TemporaryDirectory(prefix="pagemill-fit-") as name:
        folder = Path(name)
        file = folder / "pagemill.yaml"
        file.write_text(f"{CONFIG}nats: {{port: 0, store_dir: {folder}/nats}}\n")
        config = settings.load_config(file)
        logs.configure_logging("error", role="fit")
        specs = [spec for spec in default_workers(config) if spec.role != "engine"]
        specs += [WorkerSpec("engine", "demo")] * NUM_ENGINES
        cluster = TimedCluster(config, file, specs, log_file=folder / "log")
        (folder / "nats").mkdir()
        try:
            await cluster.start()
            bus = await Bus.connect(cluster.url, "fit")
            # The first requests of an engine find nothing in the caches of its processor.
            await asyncio.gather(*(_ask(bus, turn) for turn in alone(8, seed=0)))
            found_alone = [await _ask(bus, turn) for turn in lone]
            began_s = time.perf_counter()
            found = await asyncio.gather(*(_ask_at(bus, turn, began_s) for turn in turns))
            await bus.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                await cluster.stop()
        return list(found), found_alone, list(_read_steps(folder / "nats"))


def _read_steps(folder: Path) -> Iterator[Step]:
    for file in sorted(folder.glob("*.jsonl")):
        for line in file.read_text().splitlines():
            tokens, context, step_s = json.loads(line)
            yield tokens, context, step_s


async def _ask_at(bus: Bus, turn: Turn, began_s: float) -> Answer:
    await asyncio.sleep(max(0.0, began_s + turn.at_s - time.perf_counter()))
    late_s = time.perf_counter() - began_s - turn.at_s
    if late_s > MAX_LATE_S:
        raise SystemExit(f"the machine is too busy: a request was sent {late_s:.1f} s late")
    return await _ask(bus, turn)


async def _ask(bus: Bus, turn: Turn) -> Answer:
    sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        "demo", sampling_params=sampling, prompt_token_ids=list(turn.token_ids)
    )
    sent_s, first_s = time.perf_counter(), 0.0
    async for record in ask(bus, request, new_request_id()):
        if isinstance(record, TokenChunk):
            first_s = first_s or time.perf_counter()
        elif isinstance(record, Finish):
            usage = record.usage
            return Answer(first_s - sent_s, usage.prompt_tokens, usage.cached_tokens)
        else:
            raise SystemExit(f"a request failed: {record}")
    raise SystemExit("a request has no end")


def report(num_requests: int, rate: float, seed: int) -> Iterator[str]:
    """Yield the fitted costs and the comparison; the last line says whether all figures agree."""
    turns, lone = chats(num_requests, rate, seed), alone(NUM_ALONE, seed)
    began_s, cpu_s = time.monotonic(), _busy_s()
    answers, found_alone, steps = asyncio.run(measure(turns, lone))
    took_s = time.monotonic() - began_s
    cost = fit_cost(steps, LIMITS)
    extra_s = overhead_s(list(zip(lone, found_alone, strict=True)), cost)
    yield f"{len(turns)} requests, {rate:g} a second, {NUM_ENGINES} engines, {len(steps)} steps"
    yield (
        f"step = {1000 * cost.step_s:.3f} ms + {1e6 * cost.token_s:.2f} us * tokens"
        f" + {1e9 * cost.context_s:.2f} ns * context, which explains"
        f" {explained(steps, cost):.0%} of the variance"
    )
    yield f"outside of steps, to the first token: {1000 * extra_s:.1f} ms"
    yield (
        f"processors were {(_busy_s() - cpu_s) / took_s:.2f} busy in the mean,"
        f" load at the end {os.getloadavg()[0]:.1f}"
    )
    yield "| | run | simulator | deviation |"
    yield "|---|---|---|---|"
    found = list(compare(turns, answers, cost, extra_s, NUM_ENGINES, BLOCK))
    for one in found:
        yield f"| {one.name} | {one.measured:.3f} | {one.simulated:.3f} | {one.deviation:+.0%} |"
    close = all(one.is_close for one in found[:2])
    yield f"hit rate and TTFT p50 {'agree' if close else 'do not agree'} within 20 %"


def _busy_s() -> float:
    """Return the seconds for which all processors of this machine have been busy so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = (int(field) for field in fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
