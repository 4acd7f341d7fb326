"""The systems that the benchmark of jobs compares: a client and a worker for each."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import nats
from nats.aio.msg import Msg

from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from shared.stage.runtime import Shutdown
from shared.stage.worker_loop import serve

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


@contextlib.asynccontextmanager
async def our_client(url: str) -> AsyncIterator[Submit]:
    bus = await Bus.connect(url, "bench")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())

    async def submit(job: str) -> None:
        number = job[:NUMBER_LEN]
        await bus.publish(subjects.stage(*STAGE, number), job.encode(), number)

    yield submit
    await bus.close()


async def our_worker(site: Site) -> None:
    bus = await Bus.connect(site.url, "bench")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    queue = subjects.stage_filter(*STAGE)
    consumer = await bus.queues.consume(subjects.STAGES_STREAM, "bench", queue, site.window, 30.0)

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
