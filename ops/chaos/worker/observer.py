"""Records the steps of a worker, and lets it die at crash points between any two of them."""

from collections import Counter
from collections.abc import Callable
from typing import Any

from ops.chaos.history import Journal, WorkerEvent, now
from ops.chaos.patching import wrap
from ops.chaos.worker import payload_events
from ops.chaos.worker.crash_points import CrashPoints
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer, Delivery
from shared.protocol.encoding import to_json
from shared.protocol.records import TokenChunk
from shared.protocol.subjects import id_in, id_of_log, is_request
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.stage import Stage
from shared.state.token_log import LogWriter

# Every record begins with these bytes, except the last of its log.
_TOKENS = to_json(TokenChunk(0, 0, [])).partition(b",")[0]


def watch(journal: Journal, crash: CrashPoints) -> None:
    """Wrap the product's methods in this process."""

    def record(step: str, id: str = "", at: int = 0) -> None:
        journal.write(WorkerEvent(now(), step, id, at))

    _watch_start(record)
    _watch_deliveries(record, crash)
    _watch_claims(record)
    _watch_forwarding(crash)
    payload_events.watch(record, crash)
    _watch_log(record, crash)


def _watch_start(record: payload_events.Record) -> None:

    @wrap(Context, "ready")
    def ready(
        announce: Any, self: Context, models: list[str], load: Callable[[], dict[str, float]]
    ) -> None:
        announce(self, models, load)
        record("ready")


def _watch_deliveries(record: payload_events.Record, crash: CrashPoints) -> None:
    @wrap(Consumer, "next")
    async def next_(original: Any, self: Consumer) -> Delivery:
        delivery: Delivery = await original(self)
        record("received", _id_of(delivery), delivery.attempt)
        return delivery

    @wrap(Delivery, "ack")
    async def ack(original: Any, self: Delivery) -> None:
        await original(self)
        record("acked", _id_of(self), self.attempt)
        crash("after_ack")

    @wrap(Delivery, "retry")
    async def retry(original: Any, self: Delivery, after_s: float) -> None:
        await original(self, after_s)
        record("requeued", _id_of(self), self.attempt)


def _watch_claims(record: payload_events.Record) -> None:
    @wrap(Stage, "claim")
    async def claim(original: Any, self: Stage, job: Job) -> LogWriter | None:
        log: LogWriter | None = await original(self, job)
        if log is not None:
            record("claimed", job.request_id or "", job.delivery.attempt)
        return log


def _watch_forwarding(crash: CrashPoints) -> None:
    @wrap(Bus, "publish")
    async def publish(original: Any, self: Bus, subject: str, *args: Any, **named: Any) -> Any:
        is_task = subject.startswith("pm.stage.")
        if is_task:
            crash("before_publish")
        stored = await original(self, subject, *args, **named)
        if is_task:
            crash("after_publish_before_ack")
        return stored


def _watch_log(record: payload_events.Record, crash: CrashPoints) -> None:
    num_appended: Counter[str] = Counter()

    @wrap(Bus, "append")
    async def append(
        original: Any,
        self: Bus,
        subject: str,
        data: bytes,
        last: int,
        *args: Any,
        **named: Any,
    ) -> int:
        final = not data.startswith(_TOKENS)
        if final:
            crash("before_final")
        sequence: int = await original(self, subject, data, last, *args, **named)
        record("appended", id_of_log(subject))
        if final:
            crash("after_final_before_ack")
        else:
            num_appended[subject] += 1
            crash(f"mid_tokens:{num_appended[subject]}")
        return sequence


def _id_of(delivery: Delivery) -> str:
    if is_request(delivery.subject):
        return id_in(delivery.subject)
    return (delivery.msg_id or "").partition(":")[0]
