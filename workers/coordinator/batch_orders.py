"""Orders for batches that clients publish with the key of their tenant, and their cancellations.

They are in the tenant's queue of requests. A coordinator moves them to the log and the queue of
batches, where batchers find them like the batches of gateways. An order that is refused ends with
its error in the log of its batch, because its publish was acknowledged.
"""

import contextlib

from shared.bus.consumer import Delivery
from shared.bus.store_room import StoreRoom
from shared.errors import DecodeError, Fenced, PagemillError
from shared.helpers.validation import invalid_request
from shared.protocol import names, subjects
from shared.protocol.batch_log import BatchBegun
from shared.protocol.batch_orders import MAX_BATCH_ID_LEN, BatchOrder, decode_batch_order
from shared.protocol.encoding import UNDECODABLE
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.state import batch_intake, batch_log

ID_RULE = (
    f"the id of a batch must be 1 to {MAX_BATCH_ID_LEN} letters, digits, '-' or '_', and must not"
    f" be {subjects.BATCH_FILES!r}"
)


def id_of(delivery: Delivery) -> str | None:
    """Return the id of the job of an order; None if the id of its batch is invalid."""
    name = subjects.last_token(delivery.subject)
    is_valid = len(name) <= MAX_BATCH_ID_LEN and name != subjects.BATCH_FILES
    job_id = names.job_id("batch", name, delivery.tenant)
    return job_id if is_valid and names.is_job_id(job_id) else None


def _batch_of(job: Job) -> tuple[str, str]:
    """Return the id of a batch and its tenant."""
    return subjects.last_token(job.delivery.subject), job.delivery.tenant


class BatchOrders:
    def __init__(self, context: Context, room: StoreRoom) -> None:
        self._context = context
        self._bus = context.bus
        self._limits = context.config.batch
        self._room = room

    async def carry_out(self, job: Job) -> None:
        """Begin or cancel a batch. Raises PagemillError for an order that is refused."""
        if job.request_id is None:
            raise DecodeError(ID_RULE, field="batch_id")
        batch_id, tenant = _batch_of(job)
        if subjects.is_batch_cancellation(job.delivery.subject):
            await batch_log.cancel_by_id(self._bus, tenant, batch_id)
        # A client may publish its order again.
        elif await batch_log.open_batch(self._bus, tenant, batch_id) is None:
            await self._begin(batch_id, tenant, job.delivery.data)
        await self._context.stage.finish(job)

    async def _begin(self, batch_id: str, tenant: str, data: bytes) -> None:
        order = _decode(data)
        await self._room.check()
        await self._context.quotas.check(tenant, [subjects.BATCHES_STREAM])
        begun = await batch_intake.accept(self._bus, self._limits, tenant, batch_id, order)
        with contextlib.suppress(Fenced):  # A gateway has begun a batch with this id.
            await batch_log.begin(self._bus, begun)
        self._context.log.info("batch_accepted", batch_id=batch_id, tenant=tenant)

    async def refuse(self, job: Job, error: PagemillError) -> None:
        """End the batch of an order with an error, unless it has begun."""
        if job.request_id is None or subjects.is_batch_cancellation(job.delivery.subject):
            return
        batch_id, tenant = _batch_of(job)
        if await batch_log.open_batch(self._bus, tenant, batch_id) is not None:
            return
        now_s = int(self._bus.now_ms() / 1000)
        try:
            order = _decode(job.delivery.data)
        except PagemillError:
            order = BatchOrder("")
        file, window = (order.input_file_id or "").removeprefix("file-"), order.completion_window
        expires_s = now_s + int(self._limits.ttl_s)
        begun = BatchBegun(batch_id, tenant, order.endpoint, file, now_s, window, now_s, expires_s)
        await batch_log.refuse(self._bus, begun, error)


def _decode(data: bytes) -> BatchOrder:
    try:
        return decode_batch_order(data)
    except UNDECODABLE as error:
        raise invalid_request(error, BatchOrder) from error
