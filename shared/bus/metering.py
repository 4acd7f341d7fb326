"""Measurement of logs in a stream, by subject or by tenant."""

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js import api

from shared.bus.bus import Bus
from shared.bus.connection import REPLY_TIMEOUT_S, next_message, pull
from shared.errors import Unavailable
from shared.protocol.stored_size import SIZE_HEADER, tenant_and_bytes

BATCH = 4096
# The server removes an unused consumer after this time, in case its deletion is lost.
UNUSED_S = 5.0
FIRST_OF_LOG = {"Nats-Expected-Last-Subject-Sequence": "0"}


@dataclass(frozen=True, slots=True)
class LogUse:
    """Numbers of begun logs and appended bytes, up to a sequence of the stream."""

    num_logs: int = 0
    num_bytes: int = 0
    next_sequence: int = 1


class StreamMeter:
    """Measures streams by the headers of their messages."""

    def __init__(self, bus: Bus) -> None:
        self._nc, self._js = bus.connection.nc, bus.connection.js

    async def measure_logs(self, stream: str, subject: str, before: LogUse) -> LogUse:
        """Return `before` plus the messages that were appended since, and are still stored.

        Raises Unavailable.
        """
        start = {
            "deliver_policy": api.DeliverPolicy.BY_START_SEQUENCE,
            "opt_start_seq": before.next_sequence,
        }
        async for message in self._read_headers(stream, subject, **start):
            headers = message.headers or {}
            before = LogUse(
                before.num_logs + (headers.items() >= FIRST_OF_LOG.items()),
                before.num_bytes + int(headers[SIZE_HEADER]),
                message.metadata.sequence.stream + 1,
            )
        return before

    async def measure_tenants(self, stream: str) -> dict[str, int]:
        """Return the approximate bytes of each tenant, from the last message of each subject.

        Raises Unavailable.
        """
        use: Counter[str] = Counter()
        policy = api.DeliverPolicy.LAST_PER_SUBJECT
        async for message in self._read_headers(stream, ">", deliver_policy=policy):
            tenant, num_bytes = tenant_and_bytes(message.subject, message.headers or {})
            if tenant:
                use[tenant] += num_bytes
        return dict(use)

    async def _read_headers(self, stream: str, subject: str, **start: Any) -> AsyncIterator[Msg]:
        """Yield the messages of `subject` with headers alone, without their content."""
        config = api.ConsumerConfig(
            filter_subject=subject,
            ack_policy=api.AckPolicy.NONE,
            headers_only=True,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=UNUSED_S,
            **start,
        )
        try:
            info = await self._js.add_consumer(stream, config)
            num_left = info.num_pending or 0
            while num_left > 0:
                query = json.dumps({"batch": min(num_left, BATCH), "no_wait": True}).encode()
                next_messages = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}"
                async with pull(self._nc, next_messages, query) as replies:
                    for _ in range(min(num_left, BATCH)):
                        message = await next_message(replies, REPLY_TIMEOUT_S)
                        if "Status" in (message.headers or {}):
                            num_left = 0  # The other messages were removed meanwhile.
                            break
                        num_left -= 1
                        yield message
                await asyncio.sleep(0)
            with contextlib.suppress(NatsError):
                await self._js.delete_consumer(stream, info.name)
        except NatsError as error:
            raise Unavailable(f"the broker did not report on {subject}: {error}") from error
