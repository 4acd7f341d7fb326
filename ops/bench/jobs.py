"""Measure jobs per second of a stage without work: our queue and others, on one broker.

A client keeps a fixed number of jobs in flight; a worker in another process receives each, reports
it to the client over core NATS, and acknowledges it. Every system has the same server, with the
settings that we ship, the same job and the same window; rounds alternate between them.

The others are measured if they are installed in a folder of their own:

    pip install --target FOLDER taskiq-nats 'faststream[nats]'
    python -m ops.bench.jobs --peers FOLDER
"""

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import nats
import uvloop
from nats.aio.client import Client
from nats.aio.msg import Msg
from rich.console import Console
from rich.table import Table

from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.bus.embedded_server import CONFIG_DIR, EmbeddedServer
from shared.config import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.stage.runtime import Shutdown
from shared.stage.worker_loop import serve
from shared.telemetry import logs

PAYLOAD_LEN = 200
NUMBER_LEN = 8
WINDOW = 64
# Peers wait until a batch is full or its time is over. A quarter of the window is soon full, so no
# batch waits for its time while the window is full.
FETCH_SHARE = 4
FETCH_TIMEOUT_S = 60.0
DONE = "bench.done"
SUBJECT = "bench.jobs"
STAGE = ("renderer", "bench", "batch")
JOB_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0

Submit = Callable[[str], Awaitable[object]]
"""Submits a job and returns when it is accepted; the payload begins with the job's number."""
Report = Callable[[str], Awaitable[object]]
Submitting = Callable[[str], contextlib.AbstractAsyncContextManager[Submit]]
Worker = Callable[["Site"], Awaitable[None]]
"""Receives jobs until its process is killed."""


@dataclass(frozen=True, slots=True)
class Site:
    """A worker's place: the server, and how to report to the client."""

    url: str
    window: int
    report: Report
    ready: Callable[[], None]

    @property
    def fetch(self) -> int:
        return max(self.window // FETCH_SHARE, 1)


@dataclass(frozen=True, slots=True)
class System:
    name: str
    durable: bool
    submitting: Submitting
    work: Worker
    replies: bool = False
    """Whether `submit` returns only when the job is done."""


# -- ours ------------------------------------------------------------------------------------------


@contextlib.asynccontextmanager
async def our_client(url: str) -> AsyncIterator[Submit]:
    bus = await Bus.connect(url, "bench")
    await bus.prepare(NatsConfig(unchecked=True), DeliveryConfig())

    async def submit(job: str) -> None:
        number = job[:NUMBER_LEN]
        await bus.publish(subjects.stage(*STAGE, number), job.encode(), number)

    yield submit
    await bus.close()


async def our_worker(site: Site) -> None:
    bus = await Bus.connect(site.url, "bench")
    await bus.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    queue = subjects.stage_filter(*STAGE)
    consumer = await bus.consume(subjects.STAGES_STREAM, "bench", queue, site.window, 30.0)

    async def handle(delivery: Delivery) -> None:
        await site.report(delivery.data.decode())
        await delivery.ack()

    site.ready()
    await serve(consumer, handle, Shutdown(), 1.0)


# -- the limit: no durability, no queue ------------------------------------------------------------


@contextlib.asynccontextmanager
async def request_client(url: str) -> AsyncIterator[Submit]:
    nc = await nats.connect(url)
    yield lambda job: nc.request(SUBJECT, job.encode(), timeout=JOB_TIMEOUT_S)
    await nc.close()


async def reply_worker(site: Site) -> None:
    nc = await nats.connect(site.url)

    async def answer(msg: Msg) -> None:
        await msg.respond(msg.data[:NUMBER_LEN])

    await nc.subscribe(SUBJECT, queue="bench", cb=answer)
    await nc.flush()
    site.ready()
    await asyncio.Event().wait()


# -- taskiq ----------------------------------------------------------------------------------------


def taskiq_broker(url: str, durable: bool, fetch: int = 1) -> Any:
    from taskiq_nats import NatsBroker, PullBasedJetStreamBroker

    if not durable:
        return NatsBroker(url, subject=SUBJECT, queue="bench")
    return PullBasedJetStreamBroker(
        url, subject=SUBJECT, pull_consume_batch=fetch, pull_consume_timeout=FETCH_TIMEOUT_S
    )


def taskiq_client(durable: bool) -> Submitting:
    @contextlib.asynccontextmanager
    async def client(url: str) -> AsyncIterator[Submit]:
        broker = taskiq_broker(url, durable)

        @broker.task(task_name="job")  # type: ignore[untyped-decorator]
        async def run(job: str) -> None:
            raise NotImplementedError

        await broker.startup()
        yield run.kiq
        await broker.shutdown()

    return client


def taskiq_worker(durable: bool) -> Worker:
    async def work(site: Site) -> None:
        from taskiq.receiver import Receiver

        broker = taskiq_broker(site.url, durable, site.fetch)

        @broker.task(task_name="job")  # type: ignore[untyped-decorator]
        async def run(job: str) -> None:
            await site.report(job)

        broker.is_worker_process = True
        await broker.startup()
        receiver = Receiver(broker, max_async_tasks=2 * WINDOW, run_startup=False)
        site.ready()
        await receiver.listen(asyncio.Event())

    return work


# -- faststream ------------------------------------------------------------------------------------


def faststream_broker(url: str) -> Any:
    from faststream.nats import NatsBroker

    return NatsBroker(url, logger=None)


def faststream_client(durable: bool) -> Submitting:
    @contextlib.asynccontextmanager
    async def client(url: str) -> AsyncIterator[Submit]:
        broker = faststream_broker(url)
        await broker.start()
        if durable:
            yield lambda job: broker.publish(job, SUBJECT, stream="faststream")
        else:
            yield lambda job: broker.request(job, SUBJECT, timeout=JOB_TIMEOUT_S)
        await broker.stop()

    return client


def faststream_worker(durable: bool) -> Worker:
    async def work(site: Site) -> None:
        from faststream.nats import PullSub

        broker = faststream_broker(site.url)
        if durable:
            source = {
                "stream": "faststream",
                "durable": "bench",
                "pull_sub": PullSub(site.fetch, FETCH_TIMEOUT_S),
            }

            @broker.subscriber(SUBJECT, **source)  # type: ignore[untyped-decorator]
            async def run(job: str) -> None:
                await site.report(job)

        else:

            @broker.subscriber(SUBJECT, queue="bench")  # type: ignore[untyped-decorator]
            async def answer(job: str) -> str:
                return job[:NUMBER_LEN]

        await broker.start()
        site.ready()
        await asyncio.Event().wait()

    return work


OURS = {
    "pagemill": System("pagemill stage", True, our_client, our_worker),
    "request": System("nats-py request/reply", False, request_client, reply_worker, replies=True),
}
PEERS = {
    "taskiq-js": System("taskiq, JetStream", True, taskiq_client(True), taskiq_worker(True)),
    "taskiq-core": System("taskiq, core", False, taskiq_client(False), taskiq_worker(False)),
    "faststream-js": System(
        "faststream, JetStream", True, faststream_client(True), faststream_worker(True)
    ),
    "faststream-core": System(
        "faststream, core", False, faststream_client(False), faststream_worker(False), replies=True
    ),
}
SYSTEMS = OURS | PEERS


# -- the two sides ---------------------------------------------------------------------------------


class Result(msgspec.Struct):
    jobs_s: float
    latencies_ms: list[float]
    """Seconds from submission to the report that the job is done."""


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
    console = Console()
    names = list(SYSTEMS if peers else OURS)
    if peers is None:
        console.print("taskiq and faststream are left out: no folder given with --peers")
    names = [name for name in names if not only or name in only]
    full: dict[str, list[Result]] = {name: [] for name in names}
    alone: dict[str, list[Result]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
        for number in range(rounds):
            for name in names:
                for found, window, n in ((full, WINDOW, count), (alone, 1, count // 10)):
                    broker = make_broker(Path(folder) / f"{name}-{window}-{number}")
                    broker.start()
                    try:
                        found[name].append(measure(name, broker.url, n, window, peers))
                    finally:
                        broker.kill()
    table = Table(
        title=f"no-op jobs of {PAYLOAD_LEN} bytes: median of {rounds} rounds, {count} jobs in each",
        title_justify="left",
    )
    table.add_column("system")
    for title in ("durable", f"jobs/s, {WINDOW} in flight", "of ours", "one: p50 ms", "p99 ms"):
        table.add_column(title, justify="right")
    ours = _jobs_s(full[names[0]])
    for name in names:
        system, jobs_s = SYSTEMS[name], _jobs_s(full[name])
        cuts = statistics.quantiles([ms for r in alone[name] for ms in r.latencies_ms], n=100)
        table.add_row(
            system.name,
            "yes" if system.durable else "no",
            f"{jobs_s:,.0f}",
            f"{jobs_s / ours:.2f}",
            f"{cuts[49]:.2f}",
            f"{cuts[98]:.2f}",
        )
    console.print(table)


def _jobs_s(results: list[Result]) -> float:
    return statistics.median(result.jobs_s for result in results)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=4000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", type=Path, help="folder into which the peers were installed")
    parser.add_argument("--only", nargs="+", default=[], choices=list(SYSTEMS))
    parser.add_argument("--relaxed", action="store_true", help="let the server sync when it likes")
    parser.add_argument("--side", nargs=5, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        logs.configure_logging("warning", role="bench")
        name, url, count, window, side = given.side
        run = run_worker(SYSTEMS[name], url, int(window))
        if side == "client":
            run.close()
            run = run_client(SYSTEMS[name], url, int(count), int(window))
        uvloop.run(run)
    else:
        broker = RelaxedBroker if given.relaxed else EmbeddedServer
        main(given.count, given.rounds, given.peers, given.only, broker)
