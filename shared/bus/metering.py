"""Measuring how much of a stream the logs under some subjects take."""

import asyncio
import contextlib
import json
from dataclasses import dataclass

from nats.errors import Error as NatsError
from nats.js import api

from shared.bus.connection import REPLY_TIMEOUT_S, BusPart, next_message, pull
from shared.errors import Unavailable

BATCH = 4096
# A consumer that only measures is removed after so long if its deletion is lost.
UNUSED_S = 5.0
FIRST_OF_LOG = {"Nats-Expected-Last-Subject-Sequence": "0"}


@dataclass(frozen=True, slots=True)
class LogUse:
    """Logs that were begun, and bytes that were appended, before a sequence of the stream."""

    num_logs: int = 0
    num_bytes: int = 0
    next_sequence: int = 1


class StreamMeter(BusPart):
    """The part of `Bus` that measures streams."""

    async def measure_logs(self, stream: str, subject: str, before: LogUse) -> LogUse:
        """Return `before` with what was appended to the logs since then, and is still stored.

        The server sends the headers alone. Raises Unavailable.
        """
        config = api.ConsumerConfig(
            filter_subject=subject,
            deliver_policy=api.DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=before.next_sequence,
            ack_policy=api.AckPolicy.NONE,
            headers_only=True,
            mem_storage=True,
            num_replicas=1,
            inactive_threshold=UNUSED_S,
        )
        try:
            info = await self._js.add_consumer(stream, config)
            num_left = info.num_pending or 0
            while num_left > 0:
                num_logs, num_bytes, sequence = before.num_logs, before.num_bytes, 0
                query = json.dumps({"batch": min(num_left, BATCH), "no_wait": True}).encode()
                asked = f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{info.name}"
                async with pull(self._nc, asked, query) as replies:
                    for _ in range(min(num_left, BATCH)):
                        message = await next_message(replies, REPLY_TIMEOUT_S)
                        headers = message.headers or {}
                        if "Status" in headers:
                            num_left = 0  # Some have been removed meanwhile.
                            break
                        num_logs += headers.items() >= FIRST_OF_LOG.items()
                        num_bytes += int(headers["Nats-Msg-Size"])
                        sequence = message.metadata.sequence.stream
                        num_left -= 1
                if sequence:
                    before = LogUse(num_logs, num_bytes, sequence + 1)
                await asyncio.sleep(0)
            with contextlib.suppress(NatsError):
                await self._js.delete_consumer(stream, info.name)
        except NatsError as error:
            raise Unavailable(f"the broker did not report on {subject}: {error}") from error
        return before
