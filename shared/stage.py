"""How a stage settles what it was given: hand on, answer, retry, or dead letter.

The hand-over rule: publish the next message under an id of its own, wait for the publish ack, and
only then acknowledge the input. A crash in between is a redelivery whose publish is recognised.
"""

import asyncio
import time
import traceback
from collections.abc import Awaitable, Callable

import structlog

from shared import retry, subjects
from shared.bus import Bus
from shared.config import DeliveryConfig
from shared.consumer import Consumer, Delivery
from shared.errors import Fenced, PagemillError, WorkerFailure
from shared.messages import DeadLetter, Hop, error_info, to_msgpack
from shared.tokenlog import fail_request

_log = structlog.get_logger()

# The end of a traceback tells most. What surrounds the input in a dead letter fits into the second.
MAX_TRACEBACK_LEN = 16_384
MAX_LETTER_BYTES = 65_536


def now_ms() -> float:
    return time.time() * 1000


class Stage:
    """The identity under which a worker settles its deliveries."""

    def __init__(
        self, bus: Bus, role: str, worker: str, version: str, policy: DeliveryConfig
    ) -> None:
        self.bus = bus
        self.role = role
        self.worker = worker
        self._version = version
        self._policy = policy

    def hop(self, delivery: Delivery, received_ms: float) -> Hop:
        return Hop(self.role, self.worker, delivery.attempt, received_ms, now_ms())

    def request_id_of(self, delivery: Delivery) -> str | None:
        """From the id under which `hand_over` published it; for a message that cannot be read."""
        request_id = (delivery.msg_id or "").removesuffix(f":{self.role}")
        return request_id if subjects.is_name(request_id) else None

    async def hand_over(
        self, delivery: Delivery, request_id: str, role: str, model: str, lane: str, data: bytes
    ) -> None:
        """Publish `data` for the next stage, then acknowledge the input."""
        await self.bus.publish(subjects.stage(role, model, lane), data, f"{request_id}:{role}")
        await delivery.ack()

    async def settle_failure(
        self,
        delivery: Delivery,
        request_id: str | None,
        error: Exception,
        path: list[Hop],
    ) -> None:
        """Decide by the retry policy and carry it out."""
        cause = error if isinstance(error, PagemillError) else _as_failure(error)
        log = _log.bind(request_id=request_id, attempt=delivery.attempt)
        if isinstance(cause, Fenced):
            log.warning("fenced", reason=cause.message)
            delivery.abandon()
            return
        decision = retry.decide(cause, delivery.attempt, self._policy)
        log.warning(
            "failed",
            code=cause.code,
            reason=cause.message,
            decision=type(decision).__name__.lower(),
            exc_info=error if cause.fault == "server" else None,
        )
        match decision:
            case retry.Retry(after_s):
                await delivery.retry(after_s)
                return
            case retry.DeadLetter():
                await self._write_dead_letter(delivery, request_id, cause, error)
            case retry.Answer():
                pass
        if request_id is not None:
            await fail_request(self.bus, request_id, delivery.attempt, cause, path)
        await delivery.ack()

    async def _write_dead_letter(
        self, delivery: Delivery, request_id: str | None, cause: PagemillError, error: Exception
    ) -> None:
        letter = DeadLetter(
            role=self.role,
            worker=self.worker,
            version=self._version,
            subject=delivery.subject,
            request_id=request_id,
            attempts=delivery.attempt,
            error=error_info(cause),
            traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK_LEN:],
            input=delivery.data[: self.bus.max_payload - MAX_LETTER_BYTES],
            input_len=len(delivery.data),
            failed_ms=now_ms(),
        )
        name = request_id or f"unnamed-{delivery.stored_ms:.0f}"
        await self.bus.publish(
            subjects.dead(self.role), to_msgpack(letter), f"dead:{name}:{delivery.subject}"
        )

    def exhausted(self, delivery: Delivery) -> PagemillError | None:
        """The error of a delivery that was tried too often already, by workers that died of it."""
        if delivery.attempt <= self._policy.max_deliver:
            return None
        return WorkerFailure(
            f"given up after {self._policy.max_deliver} attempts that ended without an answer"
        )


def _as_failure(error: Exception) -> WorkerFailure:
    # The client learns that we failed, not how: our messages may hold paths and addresses.
    return WorkerFailure("a worker failed on this request")


Handler = Callable[[Delivery], Awaitable[None]]


async def serve(
    consumer: Consumer, handle: Handler, stopping: asyncio.Event, drain_s: float
) -> None:
    """Run `handle` for every delivery until `stopping`; then finish what is in hand.

    Deliveries that are not done after `drain_s` are cancelled, and go to another worker.
    """
    running: set[asyncio.Task[None]] = set()
    stop = asyncio.create_task(stopping.wait())
    while not stopping.is_set():
        delivery = asyncio.create_task(consumer.next())
        await asyncio.wait({delivery, stop}, return_when=asyncio.FIRST_COMPLETED)
        if not delivery.done():
            delivery.cancel()
            break
        task = asyncio.create_task(_run(handle, delivery.result()))
        running.add(task)
        task.add_done_callback(running.discard)
    await consumer.stop()
    if running:
        _, late = await asyncio.wait(running, timeout=drain_s)
        for task in late:
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)


async def _run(handle: Handler, delivery: Delivery) -> None:
    try:
        await handle(delivery)
    except asyncio.CancelledError:
        await delivery.retry(0)
        raise
    except Exception:
        # Settling itself failed: the broker is away. The message comes again after its ack wait.
        _log.exception("unsettled", subject=delivery.subject, attempt=delivery.attempt)
        delivery.abandon()
