"""What a client does: publish a request, follow its token log. `pagemill ask` and tests use it."""

import secrets
from collections.abc import AsyncIterator

from shared import subjects
from shared.bus import Bus
from shared.errors import InvalidRequest
from shared.messages import GenerateRequest, LogRecord, decode_log_record, to_json
from shared.tokenlog import is_final, read_log

# Live records may be lost on the way; after this silence the log itself is asked.
SILENCE_S = 2.0


def new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


async def ask(bus: Bus, request: GenerateRequest, request_id: str) -> AsyncIterator[LogRecord]:
    """Publish `request` and yield its log, each record once and in order, to the final one.

    A request id that was used before yields the log of the request that used it.
    """
    if not subjects.is_name(request_id):
        raise InvalidRequest(
            f"request_id must be 1 to {subjects.MAX_NAME_LEN} letters, digits, '-' or '_'",
            field="request_id",
        )
    if not subjects.is_name(request.model):
        raise InvalidRequest(
            f"model must be 1 to {subjects.MAX_NAME_LEN} letters, digits, '-' or '_'",
            field="model",
        )
    listener = await bus.listen(subjects.tokens(request_id))
    try:
        known = await bus.publish(subjects.request(request.model), to_json(request), request_id)
        expected = 0
        silence_s = 0.0 if known else SILENCE_S
        while True:
            live = await listener.next(silence_s) if silence_s else None
            silence_s = SILENCE_S
            record = decode_log_record(live) if live is not None else None
            if record is not None and record.index == expected:
                fresh = [record]
            elif record is not None and record.index < expected:
                continue
            else:
                fresh = (await read_log(bus, request_id))[expected:]
            for record in fresh:
                yield record
                expected = record.index + 1
                if is_final(record):
                    return
    finally:
        await listener.close()
