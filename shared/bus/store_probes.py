"""Probes of the streams on disk, because a broker that answers may still refuse to store."""

import asyncio
import json
from collections.abc import Iterable
from typing import NamedTuple

import structlog
from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError
from nats.js import api

from shared.bus.connection import REPLY_TIMEOUT_S, is_denied
from shared.protocol import subjects

REFUSING_STREAMS = "refusing_streams"
"""Key in the load of a coordinator's heartbeat: number of streams on disk that refuse to store."""

# Interval between probes of a stream.
PROBE_S = 2.0

# Server error code (nats-server's errors.json).
_WRITE_FAILED = 10051

NEW_KEYS = "`pagemill keys make` and a reload of the broker permit it"

_log = structlog.get_logger()


class Refusal(NamedTuple):
    """Failure of a stream's probe."""

    reason: str
    needs_restart: bool
    """Whether the stream refuses all messages until the server is restarted."""


async def probe_streams(nc: NatsClient, configs: Iterable[api.StreamConfig]) -> dict[str, Refusal]:
    """Probe the streams on disk, and return the failures by stream.

    When one write of a stream fails, for example on a full disk, nats-server 2.15.1 does not
    answer any further publish to this stream until it is restarted. It also refuses purges,
    even one that would remove nothing. The audit log is not probed, because it cannot be
    purged, and no other operation shows whether it stores without storing a record.
    """
    names = [
        config.name or ""
        for config in configs
        if config.storage is not api.StorageType.MEMORY and not config.deny_purge
    ]
    refusals = await asyncio.gather(*(_probe(nc, name) for name in names))
    return {name: refusal for name, refusal in zip(names, refusals, strict=True) if refusal}


async def _probe(nc: NatsClient, stream: str) -> Refusal | None:
    subject = f"$JS.API.STREAM.PURGE.{stream}"
    if is_denied(nc, subject):
        return None  # The keys are from a version without probes.
    query = json.dumps({"filter": subjects.PROBE}).encode()
    try:
        reply = await nc.request(subject, query, timeout=REPLY_TIMEOUT_S)
    except NatsError as failure:
        if is_denied(nc, subject):
            _log.warning("stream_not_probed", stream=stream, hint=NEW_KEYS)
            return None
        return Refusal(f"no answer: {failure or type(failure).__name__}", needs_restart=False)
    error = json.loads(reply.data).get("error")
    if error is None:
        return None
    return Refusal(error.get("description", ""), error.get("err_code") == _WRITE_FAILED)
