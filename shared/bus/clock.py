"""Clock of the broker. All deadlines use it, because the clocks of workers may differ by hours."""

import asyncio
import json
from datetime import datetime

from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError

from shared.bus.connection import REPLY_TIMEOUT_S, BusPart
from shared.errors import Unavailable


class BrokerClock(BusPart):
    """Part of `Bus` with the broker's time."""

    def __init__(self, nc: NatsClient) -> None:
        super().__init__(nc)
        self._clock_offset_ms = 0.0

    async def sync_clock(self) -> None:
        """Measure the offset to the broker's clock.

        Raises Unavailable when the broker does not answer.
        """
        loop = asyncio.get_running_loop()
        sent_s = loop.time()
        try:
            reply = await self._nc.request("$SYS.REQ.USER.INFO", b"", timeout=REPLY_TIMEOUT_S)
        except NatsError as error:
            raise Unavailable(f"the broker did not report its time: {error}") from error
        half_way_s = (sent_s + loop.time()) / 2
        broker_time = datetime.fromisoformat(json.loads(reply.data)["server"]["time"])
        self._clock_offset_ms = 1000 * (broker_time.timestamp() - half_way_s)

    def now_ms(self) -> float:
        """Return the time of the broker's clock in Unix milliseconds."""
        return self.to_broker_ms(asyncio.get_running_loop().time())

    def to_broker_ms(self, monotonic_s: float) -> float:
        """Convert a time of this machine's monotonic clock to the broker's clock."""
        return 1000 * monotonic_s + self._clock_offset_ms
