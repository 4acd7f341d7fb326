"""Measure jobs per second of a stage without work: our queue and others, on one broker.

A client keeps a fixed number of jobs in flight; a worker in another process receives each, reports
it to the client over core NATS, and acknowledges it. Every system has the same server, with the
settings that we ship, the same job and the same window; rounds alternate between them.

The other systems are measured if they are installed in a separate folder:

    pip install --target FOLDER taskiq-nats 'faststream[nats]'
    python -m ops.bench.jobs --peers FOLDER
"""

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from pathlib import Path

import msgspec
import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg

from ops.bench.job_systems import (
    DONE,
    NUMBER_LEN,
    OURS,
    PAYLOAD_LEN,
    PEERS,
    RUN_TIMEOUT_S,
    SYSTEMS,
    WINDOW,
    Site,
    Submit,
    System,
)
from ops.harness.samples import Samples, in_turns
from ops.harness.tables import console, print_table
from shared.bus.embedded_server import CONFIG_DIR, EmbeddedServer
from shared.telemetry import logs

# -- the two sides ---------------------------------------------------------------------------------


class Result(msgspec.Struct):
    jobs_s: float
    latencies_ms: list[float]
    """Milliseconds from submission to the report that the job is done."""


class Jobs:
    """The client: submits jobs and receives the reports of their ends."""

    def __init__(self, submit: Submit, replies: bool) -> None:
        self._submit = submit
        self._replies = replies
        self._done: dict[str, asyncio.Future[None]] = {}
        self._next = 0
        self._left = 0
        self._over = False
        self.latencies_ms: list[float] = []

    async def listen(self, nc: Client) -> None:
        async def done(msg: Msg) -> None:
            future = self._done.pop(msg.data.decode(), None)
            if future is not None and not future.done():
                future.set_result(None)

        await nc.subscribe(DONE, cb=done)
        await nc.flush()

    async def run(self, count: int, window: int) -> Result:
        """Measure `count` jobs in the middle of a steady flow, `window` at a time."""
        runners = [asyncio.create_task(self._run_on()) for _ in range(window)]
        await self._finished(2 * window)
        self.latencies_ms.clear()
        began_s = time.perf_counter()
        await self._finished(count)
        result = Result(count / (time.perf_counter() - began_s), self.latencies_ms[:count])
        self._over = True
        for runner in runners:
            runner.cancel()
        return result

    async def _finished(self, count: int) -> None:
        self._milestone = asyncio.get_running_loop().create_future()
        self._left = count
        await self._milestone

    async def _run_on(self) -> None:
        # `asyncio.wait_for` may lose a cancellation that arrives together with its result.
        while not self._over:
            began_s = time.perf_counter()
            await self._run_one()
            self.latencies_ms.append(1000 * (time.perf_counter() - began_s))
            self._left -= 1
            if self._left == 0:
                self._milestone.set_result(None)

    async def _run_one(self) -> None:
        number = f"{self._next:0{NUMBER_LEN}}"
        self._next += 1
        job = number.ljust(PAYLOAD_LEN, "x")
        if self._replies:
            await self._submit(job)
            return
        done = self._done[number] = asyncio.get_running_loop().create_future()
        await self._submit(job)
        await done


async def run_worker(system: System, url: str, window: int) -> None:
    nc = await nats.connect(url)

    def report(job: str) -> Awaitable[None]:
        return nc.publish(DONE, job[:NUMBER_LEN].encode())

    def ready() -> None:
        sys.stdout.write("ready\n")
        sys.stdout.flush()

    await system.work(Site(url, window, report, ready))


async def run_client(system: System, url: str, count: int, window: int) -> None:
    """Write the result to stdout."""
    nc = await nats.connect(url)
    async with system.submitting(url) as submit:
        jobs = Jobs(submit, system.replies)
        await jobs.listen(nc)
        result = await jobs.run(count, window)
    sys.stdout.buffer.write(msgspec.json.encode(result))


# -- the rounds ------------------------------------------------------------------------------------


def measure(name: str, url: str, count: int, window: int, peers: Path | None) -> Result:
    env = os.environ | {"PYTHONPATH": str(peers)} if name in PEERS else None
    sides = [sys.executable, "-m", "ops.bench.jobs", "--side", name, url, str(count), str(window)]
    with subprocess.Popen([*sides, "worker"], stdout=subprocess.PIPE, env=env) as worker:
        try:
            assert worker.stdout is not None
            if worker.stdout.readline() != b"ready\n":
                raise RuntimeError(f"the worker of {name} did not start")
            client = subprocess.run(
                [*sides, "client"],
                stdout=subprocess.PIPE,
                env=env,
                timeout=RUN_TIMEOUT_S,
                check=True,
            )
        finally:
            worker.kill()
    return msgspec.json.decode(client.stdout, type=Result)


class RelaxedBroker(EmbeddedServer):
    """Run a server that acknowledges messages before it syncs them."""

    def __init__(self, store_dir: Path) -> None:
        store_dir.mkdir(parents=True)
        shipped = (CONFIG_DIR / "nats.conf").read_text()
        file = store_dir / "nats.conf"
        file.write_text(shipped.replace("sync_interval: always", "sync_interval: 2m"))
        super().__init__(store_dir, config_file=file)


def main(
    count: int, rounds: int, peers: Path | None, only: list[str], make_broker: type[EmbeddedServer]
) -> None:
    names = list(SYSTEMS if peers else OURS)
    if peers is None:
        console.print("taskiq and faststream are left out: no folder given with --peers")
    names = [name for name in names if not only or name in only]
    full: dict[str, list[Result]] = {name: [] for name in names}
    alone: dict[str, list[Result]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        for number, name in in_turns(names, rounds):
            for results_of, window, n in ((full, WINDOW, count), (alone, 1, count // 10)):
                broker = make_broker(Path(folder) / f"{name}-{window}-{number}")
                broker.start()
                try:
                    results_of[name].append(measure(name, broker.url, n, window, peers))
                finally:
                    broker.kill()
    ours = _jobs_s(full[names[0]])
    rows = []
    for name in names:
        jobs_s = _jobs_s(full[name])
        latencies = Samples(ms for result in alone[name] for ms in result.latencies_ms)
        rows.append(
            (
                SYSTEMS[name].name,
                "yes" if SYSTEMS[name].durable else "no",
                f"{jobs_s:,.0f}",
                f"{jobs_s / ours:.2f}",
                f"{latencies.median:.2f}",
                f"{latencies.p99:.2f}",
            )
        )
    columns = (
        "system",
        "durable",
        f"jobs/s, {WINDOW} in flight",
        "of ours",
        "one: p50 ms",
        "p99 ms",
    )
    title = f"no-op jobs of {PAYLOAD_LEN} bytes: median of {rounds} rounds, {count} jobs in each"
    print_table(title, columns, rows)


def _jobs_s(results: list[Result]) -> float:
    return Samples(result.jobs_s for result in results).median


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4000, help="jobs of a round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds of each system")
    parser.add_argument("--peers", type=Path, help="folder into which the peers were installed")
    parser.add_argument(
        "--only", nargs="+", default=[], choices=list(SYSTEMS), help="these systems"
    )
    parser.add_argument("--relaxed", action="store_true", help="acknowledge before a sync")
    parser.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        logs.configure_logging("warning", role="bench")
        name, url, count, window, side = options.side
        run = run_worker(SYSTEMS[name], url, int(window))
        if side == "client":
            run.close()
            run = run_client(SYSTEMS[name], url, int(count), int(window))
        uvloop.run(run)
    else:
        broker = RelaxedBroker if options.relaxed else EmbeddedServer
        main(options.count, options.rounds, options.peers, options.only, broker)
