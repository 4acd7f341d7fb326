"""Coordinator: takes accepted requests in, hands each to its first stage, and sees to its end.

A request stays in its queue until it has ended. The coordinator puts it off to its deadline; if it
comes back by then, nobody has ended it, and the coordinator does. So the queue is the list of what
is in flight, its limit is the limit of that, and no timer lives in a process that can die.
"""

import asyncio

from shared.bus.consumer import Consumer, Delivery
from shared.errors import Cancelled, DeadlineExceeded, DecodeError
from shared.protocol import subjects
from shared.protocol.messages import (
    GenerateRequest,
    Prompt,
    RenderTask,
    RequestTicket,
    tenant_of,
    to_msgpack,
)
from shared.protocol.sampling import SamplingParams
from shared.stage.loop import serve
from shared.stage.retry import History
from shared.stage.runtime import Context
from shared.stage.stage import Job
from shared.state.token_log import end_request, is_final, last_record
from workers.coordinator.admission import admit, deadline_ms, request_id_of

# Few, for a request may have megabytes, and what waits here longer than the ack wait comes twice.
CAPACITY = 8
# What a coordinator does takes milliseconds and may be done twice: when one dies at a deadline or a
# cancellation, the next must still be in time.
ACK_WAIT_S = 1.0


async def main(context: Context) -> None:
    await Coordinator(context).serve()


class Coordinator:
    def __init__(self, context: Context) -> None:
        self._context = context
        self._stage = context.stage
        self._delivery = context.config.delivery

    async def serve(self) -> None:
        requests = await self._consume(
            subjects.REQUESTS_STREAM,
            subjects.REQUESTS_CONSUMER,
            subjects.REQUESTS_FILTER,
        )
        cancels = await self._consume(
            subjects.CANCELS_STREAM,
            subjects.CANCELS_CONSUMER,
            subjects.CANCELS_FILTER,
        )
        context = self._context
        models = sorted(context.config.models)
        context.ready(models, lambda: {"held": requests.num_in_flight + cancels.num_in_flight})
        async with asyncio.TaskGroup() as group:
            for consumer, handle in ((requests, self._handle), (cancels, self._cancel)):
                group.create_task(serve(consumer, handle, context.shutdown, self._delivery.drain_s))

    async def _consume(self, stream: str, durable: str, subject: str) -> Consumer:
        ack_wait_s = min(ACK_WAIT_S, self._delivery.ack_wait_s)
        return await self._context.bus.consume(stream, durable, subject, CAPACITY, ack_wait_s)

    async def _handle(self, delivery: Delivery) -> None:
        request_id = request_id_of(delivery.msg_id, delivery.data)
        job = Job(delivery, self._context.bus.now_ms(), request_id)
        if delivery.attempt == 1:  # Later it comes back from its deadline, or from a dead worker.
            self._stage.count_arrival(job)
        try:
            await self._accept_or_end(job)
        except asyncio.CancelledError:
            await self._stage.requeue(job)
            raise
        except Exception as error:
            # No records are kept of attempts here, for they are over in a moment.
            job.history = History(failures=delivery.attempt - 1, deaths=0)
            await self._stage.fail(job, error)

    async def _accept_or_end(self, job: Job) -> None:
        delivery, bus = job.delivery, self._context.bus
        if job.request_id is None:
            # There is no log to answer in: an operator finds it among the dead letters.
            raise DecodeError(
                "a request needs an id of 1 to 128 letters, digits, '-' or '_', not beginning"
                " with 'encode_', as Nats-Msg-Id header or as request_id",
                field="request_id",
            )
        last = await last_record(bus, job.request_id)
        if last is not None and is_final(last):
            await self._stage.finish(job)
            return
        request, sampling, prompt = admit(
            delivery.subject, job.request_id, delivery.data, self._context.config.models
        )
        accepted = RequestTicket(
            accepted_ms=delivery.stored_ms,
            deadline_ms=deadline_ms(delivery.stored_ms, request.timeout_s, self._delivery),
            sequence=delivery.sequence,
            receipt=delivery.receipt,
            tenant=tenant_of(delivery.tenant),
            cache_salt=request.cache_salt or "",
        )
        if bus.now_ms() >= accepted.deadline_ms:
            await self._expire(job, accepted)
            return
        job.accepted = accepted
        await self._hand_over(job, request, sampling, prompt)
        await delivery.retry((accepted.deadline_ms - bus.now_ms()) / 1000)

    async def _hand_over(
        self, job: Job, request: GenerateRequest, sampling: SamplingParams, prompt: Prompt
    ) -> None:
        assert job.request_id is not None
        assert job.accepted is not None
        task = RenderTask(
            request_id=job.request_id,
            model=request.model,
            lane=request.lane,
            prompt=prompt,
            sampling_params=sampling,
            accepted=job.accepted,
            path=[self._stage.span(job)],
            adapter=request.adapter,
        )
        await self._stage.publish(job, "renderer", request.model, request.lane, to_msgpack(task))
        self._stage.count_handled(job)
        metrics = self._context.metrics.of(request.model)
        metrics.counter("requests_accepted_total").add()
        self._context.log.info(
            "accepted",
            request_id=job.request_id,
            attempt=job.delivery.attempt,
            model=request.model,
            lane=request.lane,
        )

    async def _expire(self, job: Job, accepted: RequestTicket) -> None:
        assert job.request_id is not None
        allowed_s = (accepted.deadline_ms - accepted.accepted_ms) / 1000
        error = DeadlineExceeded(
            f"not finished within {allowed_s:g} s of its acceptance", field="timeout_s"
        )
        path = [self._stage.span(job)]
        await end_request(self._context.bus, job.request_id, job.delivery.attempt, error, path)
        await self._context.bus.notify(subjects.ended(job.request_id))
        # Perhaps nobody serves its model any more, and its work would lie in the queue for long.
        await self._context.bus.purge(subjects.STAGES_STREAM, subjects.stages_of(job.request_id))
        self._stage.count_error(error)
        await self._stage.finish(job)
        self._context.log.warning("expired", request_id=job.request_id, allowed_s=allowed_s)

    async def _cancel(self, delivery: Delivery) -> None:
        """End a request that nobody wants any more, or that is yet to come."""
        bus, request_id = self._context.bus, subjects.last_token(delivery.subject)
        job = Job(delivery, bus.now_ms(), request_id)
        try:
            if subjects.is_request_id(request_id):
                error = Cancelled("cancelled on request")
                await end_request(bus, request_id, delivery.attempt, error, [])
                self._stage.count_error(error)
                await bus.notify(subjects.ended(request_id))
                self._context.log.info("cancelled", request_id=request_id)
            await delivery.ack()
        except asyncio.CancelledError:
            await self._stage.requeue(job)
            raise
        except Exception as error:
            await self._stage.fail(job, error)
