"""Replies to calls: requests on core NATS that a worker answers itself."""

from collections.abc import Awaitable

import structlog

from shared.errors import PagemillError, WorkerFailure
from shared.protocol.encoding import to_json
from shared.protocol.records import error_info
from shared.protocol.renderer_rpc import ErrorReply

_log = structlog.get_logger()


async def reply_of(work: Awaitable[bytes]) -> bytes:
    """Return the result of `work`, or its error as a reply."""
    try:
        return await work
    except PagemillError as error:
        return _error_reply(error)
    except Exception:
        _log.exception("call_failed")
        return _error_reply(WorkerFailure("a worker failed on this request"))


def _error_reply(error: PagemillError) -> bytes:
    return to_json(ErrorReply(error_info(error)))
