"""A run of the demo model with two engines, whose steps are measured."""

import asyncio
import contextlib
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from ops.simulate.engine import Cost
from ops.simulate.fit.fitting import compare, explained, fit
from ops.simulate.fit.measurement import Answer, Step, read_lines
from ops.simulate.fit.trace import MAX_PROMPT, Turn, chats, strangers
from ops.simulate.simulation import quantile
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.helpers.forking import end_with_parent
from shared.protocol.records import Finish, TokenChunk
from shared.protocol.requests import GenerateRequest
from shared.protocol.sampling import SamplingParams
from shared.telemetry import logs
from workers import settings
from workers.roles import WorkerSpec, default_workers
from workers.supervisor.cluster import LocalCluster
from workers.supervisor.processes import WorkerProcesses
from workers.supervisor.supervisor import Process

ROOT = Path(__file__).parents[3]
NUM_ENGINES = 2
NUM_WARM = 8
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


@dataclass(frozen=True, slots=True)
class Seen:
    """What a client saw of a request."""

    request_id: str
    sent_s: float
    first_s: float
    ended_s: float
    cached_tokens: int


class TimedProcesses(WorkerProcesses):
    """Processes of workers, whose engines write down their steps to `steps`."""

    def __init__(self, config_file: Path, log_file: Path, steps: Path) -> None:
        super().__init__(config_file, log_file=log_file)
        self._steps = steps

    async def __call__(self, worker: WorkerSpec) -> Process:
        if worker.role != "engine":
            return await super().__call__(worker)
        arguments = ["worker", worker.role, "--nats", str(self.url), f"--model={worker.model}"]
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "ops.simulate.fit.timed_worker",
            *arguments,
            "--config",
            str(self.config_file),
            cwd=ROOT,
            env={**os.environ, "FIT_STEPS": str(self._steps)},
            start_new_session=True,
            preexec_fn=end_with_parent,
        )


async def measure(turns: Sequence[Turn]) -> tuple[list[Answer], list[Step]]:
    """Run the requests; return the answers and all steps."""
    with tempfile.TemporaryDirectory(prefix="pagemill-fit-") as name:
        folder = Path(name)
        file = folder / "pagemill.yaml"
        file.write_text(f"{CONFIG}nats: {{port: 0, store_dir: {folder}/nats}}\n")
        config = settings.load_config(file)
        logs.configure_logging("error", role="fit")
        specs = [spec for spec in default_workers(config) if spec.role != "engine"]
        specs += [WorkerSpec("engine", "demo")] * NUM_ENGINES
        processes = TimedProcesses(file, folder / "log", folder / "nats")
        cluster = LocalCluster(config, file, specs, processes=processes)
        (folder / "nats").mkdir()
        try:
            await cluster.start()
            bus = await Bus.connect(cluster.url, "fit")
            # The first requests of an engine find nothing in the caches of its processor.
            await asyncio.gather(*(_ask(bus, turn) for turn in strangers(NUM_WARM, seed=0)))
            began_s = time.monotonic()
            found = await asyncio.gather(*(_ask_at(bus, turn, began_s) for turn in turns))
            await bus.close()
        finally:
            with contextlib.suppress(ProcessLookupError):
                await cluster.stop()
        steps, first = read_lines(folder / "nats", began_s)
    answers = [
        Answer(
            turn,
            seen.sent_s - began_s,
            seen.first_s - began_s,
            seen.ended_s - began_s,
            seen.cached_tokens,
            first[seen.request_id],
        )
        for turn, seen in zip(turns, found, strict=True)
    ]
    return answers, steps


async def _ask_at(bus: Bus, turn: Turn, began_s: float) -> Seen:
    await asyncio.sleep(max(0.0, began_s + turn.at_s - time.monotonic()))
    late_s = time.monotonic() - began_s - turn.at_s
    if late_s > MAX_LATE_S:
        raise SystemExit(f"the machine is too busy: a request was sent {late_s:.1f} s late")
    return await _ask(bus, turn)


async def _ask(bus: Bus, turn: Turn) -> Seen:
    sampling = SamplingParams(max_tokens=turn.answer, temperature=0.0, ignore_eos=True)
    request = GenerateRequest(
        "demo", sampling_params=sampling, prompt_token_ids=list(turn.token_ids)
    )
    request_id, sent_s, first_s = new_request_id(), time.monotonic(), 0.0
    async for record in ask(bus, request, request_id):
        if isinstance(record, TokenChunk):
            first_s = first_s or time.monotonic()
        elif isinstance(record, Finish):
            return Seen(request_id, sent_s, first_s, time.monotonic(), record.usage.cached_tokens)
        else:
            raise SystemExit(f"a request failed: {record}")
    raise SystemExit("a request has no end")


def report(num_requests: int, rate: float, seed: int) -> Iterator[str]:
    """Yield the fitted costs and the comparison; the last line says whether all figures agree."""
    turns = chats(num_requests, rate, seed)
    began_s, cpu_s = time.monotonic(), _busy_s()
    answers, steps = asyncio.run(measure(turns))
    busy = (_busy_s() - cpu_s) / (time.monotonic() - began_s)
    fitted = fit(answers, steps, LIMITS)
    yield f"{len(turns)} requests, {rate:g} a second, {NUM_ENGINES} engines, {len(steps)} steps"
    yield (
        f"processor time of a step = {1000 * fitted.cost.step_s:.3f} ms"
        f" + {1e6 * fitted.cost.token_s:.2f} us * tokens"
        f" + {1e9 * fitted.cost.context_s:.2f} ns * context, which explains"
        f" {explained(steps, fitted.cost):.0%} of the variance"
    )
    for prefills in (True, False):
        chosen = [step for step in steps if step.prefills is prefills]
        slowdown = sum(step.took_s for step in chosen) / sum(step.cpu_s for step in chosen)
        yield f"steps with{'' if prefills else 'out'} prefills took {slowdown:.2f} times as long"
    for name, values_s in (
        ("from clients to engines", sorted(answer.before_s for answer in answers)),
        ("from first tokens to clients", sorted(answer.after_s for answer in answers)),
    ):
        p50_s, p99_s = quantile(values_s, 0.5), quantile(values_s, 0.99)
        yield f"{name}: p50 {1000 * p50_s:.0f} ms, p99 {1000 * p99_s:.0f} ms"
    yield f"processors were {busy:.2f} busy in the mean, load at the end {os.getloadavg()[0]:.1f}"
    yield "| | run | simulator | ratio |"
    yield "|---|---|---|---|"
    found = list(compare(answers, fitted, NUM_ENGINES, BLOCK, seed))
    for one in found:
        yield f"| {one.name} | {one.measured:.3f} | {one.simulated:.3f} | {one.ratio:.2f} |"
    far = [one.name for one in found if not one.is_close]
    yield f"not within 20 %: {', '.join(far)}" if far else "all agree within 20 %"


def _busy_s() -> float:
    """Return the seconds for which all processors of this machine have been busy so far."""
    fields = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system, _, _, irq, softirq, *_ = (int(field) for field in fields)
    return (user + nice + system + irq + softirq) / os.sysconf("SC_CLK_TCK")
