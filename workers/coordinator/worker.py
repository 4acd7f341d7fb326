"""Coordinator: takes accepted requests, validates them, and hands each to its first stage."""

from shared import subjects
from shared.consumer import Delivery
from shared.errors import DecodeError
from shared.messages import RenderTask, to_msgpack
from shared.runtime import Context
from shared.stage import now_ms, serve
from workers.coordinator.admission import admit, request_id_of

CAPACITY = 64


async def main(context: Context) -> None:
    config = context.config
    consumer = await context.bus.consume(
        subjects.REQUESTS_STREAM,
        subjects.REQUESTS_CONSUMER,
        subjects.REQUESTS_FILTER,
        CAPACITY,
        config.delivery.ack_wait_s,
    )

    async def handle(delivery: Delivery) -> None:
        await _accept(context, delivery)

    context.ready(sorted(config.models), lambda: {"held": consumer.held})
    await serve(consumer, handle, context.stopping, config.delivery.drain_s)


async def _accept(context: Context, delivery: Delivery) -> None:
    received_ms = now_ms()
    stage = context.stage
    request_id = request_id_of(delivery.msg_id, delivery.data)
    log = context.log.bind(request_id=request_id, attempt=delivery.attempt)
    try:
        if (exhausted := stage.exhausted(delivery)) is not None:
            raise exhausted
        if request_id is None:
            # There is no log to answer in: an operator finds it among the dead letters.
            raise DecodeError(
                "a request needs an id of 1 to 128 letters, digits, '-' or '_', as Nats-Msg-Id"
                " header or as request_id",
                field="request_id",
            )
        request, sampling = admit(
            delivery.subject, request_id, delivery.data, context.config.models
        )
        task = RenderTask(
            request_id=request_id,
            model=request.model,
            lane=request.lane,
            messages=request.messages,
            sampling_params=sampling,
            accepted_ms=delivery.stored_ms,
            path=[stage.hop(delivery, received_ms)],
        )
        data = to_msgpack(task)
        await stage.hand_over(delivery, request_id, "renderer", request.model, request.lane, data)
        log.info("accepted", model=request.model, lane=request.lane)
    except Exception as error:
        path = [stage.hop(delivery, received_ms)]
        await stage.settle_failure(delivery, request_id, error, path)
