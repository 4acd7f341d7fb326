"""Writing of dead letters: the input of a job that is given up, stored for an operator."""

import traceback

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol import subjects
from shared.protocol.encoding import to_msgpack
from shared.protocol.messages import DeadLetter
from shared.protocol.records import error_info
from shared.stage.job import Job
from shared.tenants.storage_quotas import has_exceeded

# The end of a traceback says most. All fields beside the input fit into MAX_LETTER_BYTES.
MAX_TRACEBACK_LEN = 16_384
MAX_LETTER_BYTES = 65_536
MAX_HISTORY = 16


async def write(
    bus: Bus,
    job: Job,
    stage: str,
    worker: str,
    version: str,
    cause: PagemillError,
    error: Exception,
) -> None:
    """Store the job's input and its request; returns with the publish ack.

    They are left out for a tenant whose letters take too much of their stream.
    """
    delivery, sequence = job.delivery, job.request_sequence
    queued = None if sequence is None else await request_queue.queued_request(bus, sequence)
    if queued is not None:
        request = queued.data
    else:
        request = delivery.data if job.request_id is None else b""
    known = job.ticket or queued
    tenant = "" if known is None else known.tenant
    content = delivery.data
    if await has_exceeded(bus, tenant, subjects.DEAD_STREAM):
        # Letters do not expire, so its requests are not refused for them.
        request = content = b""
    # Neither alone exceeds the limit of a message; together they may.
    room = bus.max_payload - MAX_LETTER_BYTES
    request = request if len(request) <= room else b""
    room -= len(request)
    letter = DeadLetter(
        role=stage,
        worker=worker,
        version=version,
        subject=delivery.subject,
        request_id=job.request_id,
        attempts=delivery.attempt,
        error=error_info(cause),
        traceback="".join(traceback.format_exception(error))[-MAX_TRACEBACK_LEN:],
        history=job.attempts[-MAX_HISTORY:],
        request=request,
        input=content[:room],
        input_len=len(delivery.data),
        failed_ms=bus.now_ms(),
        tenant=tenant,
    )
    name = job.request_id or f"unnamed-{delivery.sequence}"
    await bus.publish(
        subjects.dead(stage, name),
        to_msgpack(letter),
        f"dead:{name}:{delivery.subject}:{delivery.sequence}",
        tenant,
    )
