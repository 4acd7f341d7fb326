"""A delivery that a worker has claimed, what is known of its request, and what is counted of it."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.consumer import Delivery
from shared.errors import PagemillError, Unavailable
from shared.protocol import names, subjects
from shared.protocol.messages import AttemptRecord
from shared.protocol.multimodal import BlobRef
from shared.protocol.records import StageSpan
from shared.protocol.task_messages import RequestTicket, TaskBody, TaskHeader
from shared.stage.retry import NO_HISTORY, History
from shared.state.token_log import LogWriter
from shared.telemetry.metrics import Metrics


@dataclass(slots=True, eq=False)
class Job:
    """A delivery in a worker, from its arrival to its settlement."""

    delivery: Delivery
    received_ms: float
    request_id: str | None
    """None for a message without a usable id, which can only become a dead letter."""
    header: TaskHeader | None = None
    """None until the message has been decoded."""
    body: TaskBody | None = None
    """None until the message has been decoded."""
    path: list[StageSpan] = field(default_factory=list)
    """The stages behind this one."""
    log: LogWriter | None = None
    """The log of this stage's output, or the request's own log for a stage without an output."""
    attempts: list[AttemptRecord] = field(default_factory=list)
    """Records of earlier attempts, and of this one."""
    history: History = NO_HISTORY
    suspect: bool = False
    """A worker died while it ran this job, which has not yet shown that it was not the cause."""
    waiting: bool = False
    """The work has not begun; progress of other jobs is progress towards it."""
    ended: bool = False
    """A notice said that the request has ended elsewhere."""
    running: bool = False
    """The work runs where it could end the process."""
    inputs: list[BlobRef] = field(default_factory=list)
    """Payloads that came with the task. They are released when it is acknowledged, never before."""
    outputs: list[BlobRef] = field(default_factory=list)
    """Payloads made for the next stage. They belong to this job until that task is stored."""
    end: "Callable[[Job, PagemillError], Awaitable[None]] | None" = None
    """Ends with an error what the job is about, where that is no request with a token log."""

    @property
    def ticket(self) -> RequestTicket | None:
        return None if self.header is None else self.header.ticket

    @property
    def tenant(self) -> str:
        """The tenant of the request; "" where none is named, or no valid one."""
        if self.ticket is not None:
            return self.ticket.tenant
        named = self.delivery.tenant or ""
        return named if names.is_name(named) else ""

    @property
    def request_sequence(self) -> int | None:
        """Sequence of the request in its queue, known even of a task that cannot be decoded."""
        if self.ticket is not None:
            return self.ticket.sequence
        if self.request_id is None or not subjects.is_stage(self.delivery.subject):
            return None
        return subjects.sequence_of(self.delivery.msg_id or "", self.request_id)

    def identify(self, header: TaskHeader, body: TaskBody | None = None) -> None:
        """Note the header and the body of the decoded message."""
        self.header, self.body = header, body
        self.path = header.path


class StageCounters:
    """Counts the arrivals, retries and ends of one worker's jobs."""

    def __init__(self, bus: Bus, metrics: Metrics) -> None:
        self._bus = bus
        self._metrics = metrics

    def arrived(self, job: Job) -> None:
        metrics = self._metrics_of(job)
        if job.delivery.attempt > 1:
            metrics.counter("stage_redeliveries_total").add()
        else:
            waited_s = max(0.0, job.received_ms - job.delivery.stored_ms) / 1000
            metrics.histogram("stage_queue_seconds").observe(waited_s)

    def handled(self, job: Job) -> None:
        took_s = (self._bus.now_ms() - job.received_ms) / 1000
        self._metrics_of(job).histogram("stage_handling_seconds").observe(took_s)

    def retried(self, job: Job, cause: PagemillError) -> None:
        self._metrics_of(job).counter("stage_retries_total", code=cause.code).add()

    def given_up(self, job: Job, cause: PagemillError) -> None:
        self._metrics_of(job).counter("stage_dead_letters_total", code=cause.code).add()

    def ended_with(self, cause: PagemillError) -> None:
        """Count a request that this worker has ended with an error."""
        self._metrics.counter("request_errors_total", code=cause.code).add()

    def _metrics_of(self, job: Job) -> Metrics:
        return self._metrics.of(subjects.model_of_stage(job.delivery.subject))


async def request_is_settled(bus: Bus, job: Job) -> bool:
    """Acknowledge a job's request by its receipt; returns whether it has left its queue."""
    ticket = job.ticket
    if ticket is None:
        # Without its receipt it can only be removed.
        if job.request_sequence is not None:
            await bus.delete(subjects.REQUESTS_STREAM, job.request_sequence)
        return True
    if ticket.receipt == job.delivery.receipt:
        return True
    if await bus.acknowledge(ticket.receipt):
        return True
    # A server that was cut off may have given out a receipt that its successor has never heard of.
    # A request that is still in the queue then comes to a coordinator again, which settles it.
    try:
        return await request_queue.queued_request(bus, ticket.sequence) is None
    except Unavailable:
        return False
