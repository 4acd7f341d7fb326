"""Intake: the queues of requests and cancellations that a coordinator serves.

Trusted publishers share one queue of each kind, and each tenant with a key on the bus has its own.
Coordinators create the queues of a tenant that gets a key while they run, and pull from them
without a restart. Each queue has a limited number of messages in flight, so queues take turns, and
the backlog of a tenant delays this tenant alone.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

from nats.errors import Error as NatsError

from shared.bus.consumer import Consumer, Delivery
from shared.bus.queues import CREATED_AT_ONCE
from shared.errors import PagemillError
from shared.helpers.task_set import run_for_each
from shared.protocol import subjects
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import HandleJob, WorkerLoop

# Few, because a request may have megabytes, and a request that waits here longer than the ack wait
# is delivered again.
CAPACITY = 8
# Messages in flight of the queues of all tenants. The part of each depends on its weight, and is
# from 1 to CAPACITY.
TENANTS_CAPACITY = 64
# The coordinator's work takes milliseconds and may be done twice: when one dies at a deadline or a
# cancellation, the next must still be in time.
ACK_WAIT_S = 1.0
# Interval between readings of the accounts of the broker.
FOLLOW_S = 2.0
# Time in which a start waits for the queues of tenants. In a cluster, the queues of some hundred
# tenants take minutes, and other requests must not wait for them.
START_S = 5.0

JobOf = Callable[[Delivery], Job | None]


class Intake:
    """Adds the queues of trusted publishers and of tenants to the loop of a coordinator."""

    def __init__(
        self,
        context: Context,
        loop: WorkerLoop,
        request: tuple[JobOf, HandleJob],
        cancellation: tuple[JobOf, HandleJob],
    ) -> None:
        """`request` and `cancellation` are the arguments of `WorkerLoop.add_queue` for each."""
        self._bus, self._log = context.bus, context.log
        self._delivery = context.config.delivery
        self._loop = loop
        self._handlers = {
            subjects.REQUESTS_FILTER: request,
            subjects.CANCELS_FILTER: cancellation,
        }
        self._consumers: dict[str, Consumer] = {}
        """By stream."""
        self._failure = ""
        self._has_updated = asyncio.Event()

    async def start(self) -> None:
        """Serve the queues of trusted publishers, and the queues of tenants in the background.

        Queues of tenants that need longer than START_S are served later. Raises Unavailable if a
        queue of trusted publishers cannot be served.
        """
        await self._serve(subjects.REQUESTS_STREAM, subjects.REQUESTS_FILTER)
        await self._serve(subjects.CANCELS_STREAM, subjects.CANCELS_FILTER)
        self._loop.start(self._follow())
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._has_updated.wait(), START_S)

    async def _follow(self) -> None:
        """Serve the queues of the tenants that have a key at the time."""
        while True:
            await self._try(self._create_queues)
            await self._try(self._serve_queues)
            self._has_updated.set()
            await asyncio.sleep(FOLLOW_S)

    async def _try(self, step: Callable[[], Awaitable[None]]) -> None:
        """Log the failure of a step once. It must not end the service of other queues."""
        try:
            await step()
        except (NatsError, PagemillError) as error:
            if (reason := str(error) or type(error).__name__) != self._failure:
                self._log.error("tenant_queues_incomplete", reason=reason)
                self._failure = reason

    async def _create_queues(self) -> None:
        await self._bus.streams.find_tenants()
        created = await self._bus.streams.create_for_tenants(await self._existing())
        if created:
            self._log.info("tenant_queues_created", streams=created)
        self._failure = ""

    async def _serve_queues(self) -> None:
        existing = await self._existing()
        for stream in self._consumers.keys() - existing.keys():
            if subjects.tenant_of_queue(stream):
                await self._bus.queues.leave(self._consumers.pop(stream))
        new = [queue for queue in existing.items() if queue[0] not in self._consumers]
        try:
            await run_for_each(lambda queue: self._serve(*queue), new, CREATED_AT_ONCE)
        finally:
            self._divide_capacity()

    async def _existing(self) -> dict[str, str]:
        """Return the streams of the queues, each with the filter of its consumer."""
        return {
            stream: subject
            for subject in self._handlers
            for stream in await self._bus.figures.streams_with(subject)
        }

    async def _serve(self, stream: str, subject: str) -> None:
        feeds_tasks = subject == subjects.REQUESTS_FILTER
        durable = subjects.REQUESTS_CONSUMER if feeds_tasks else subjects.CANCELS_CONSUMER
        ack_wait_s = min(ACK_WAIT_S, self._delivery.ack_wait_s)
        capacity = 1 if subjects.tenant_of_queue(stream) else CAPACITY
        consumer = await self._bus.queues.consume(
            stream, durable, subject, capacity, ack_wait_s, feeds_tasks=feeds_tasks
        )
        self._consumers[stream] = consumer
        self._loop.add_queue(consumer, *self._handlers[subject])

    def _divide_capacity(self) -> None:
        """Set the number of messages in flight of each tenant's queues."""
        tenants = {stream: subjects.tenant_of_queue(stream) for stream in self._consumers}
        weights = self._delivery.tenant_weights
        total = sum(weights.get(tenant, 1.0) for tenant in {*tenants.values()} if tenant)
        for stream, tenant in tenants.items():
            if tenant:
                part = round(TENANTS_CAPACITY * weights.get(tenant, 1.0) / total)
                self._consumers[stream].set_capacity(max(1, min(CAPACITY, part)))
