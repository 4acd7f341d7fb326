"""Requests that tests take from their queue as a coordinator does."""

import asyncio

from shared.bus.bus import Bus
from shared.bus.consumer import Consumer, Delivery
from shared.protocol import subjects


async def consume_requests(bus: Bus) -> Consumer:
    """Join the coordinators' consumer, the only one that the stream allows."""
    return await bus.queues.consume(
        subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER, subjects.REQUESTS_FILTER, 1, 60.0
    )


async def next_request(inbox: Consumer, model: str) -> Delivery:
    """Return the next request of `model`, and remove the requests that earlier tests have left."""
    async with asyncio.timeout(5):
        while subjects.model_of_request((delivery := await inbox.next()).subject) != model:
            await delivery.ack()
    return delivery
