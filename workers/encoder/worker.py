"""Encoder: pictures in, embeddings out. It has a tower and no language model.

The same picture is asked for once however many requests show it, because its task has a subject of
its own; and what has been made before is found instead of made.
"""

import asyncio
import os
from pathlib import Path

import torch
from torch import Tensor

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.consumer import Consumer, Delivery
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.codec.tensors import to_torch
from shared.errors import BlobLost, ConfigError, Overloaded
from shared.models.tower import load_tower
from shared.protocol import subjects
from shared.protocol.messages import EncodeTask, Failure
from shared.stage.loop import serve
from shared.stage.runtime import Context
from shared.stage.stage import Job
from shared.state.token_log import last_record
from shared.vision.embedding_store import EmbeddingStore
from workers.encoder.tower import TowerThread

WATCH_S = 0.5
# How often somebody who waits for room looks whether there is some.
ROOM_PAUSE_S = 0.25


async def main(context: Context) -> None:
    config, name = context.config, context.model
    if name is None:
        raise ConfigError("an encoder serves one model: name it with --model", field="model")
    if config.encoder.threads:
        torch.set_num_threads(config.encoder.threads)
    model = config.models[name]
    dtype = getattr(torch, model.dtype)
    tower = await asyncio.to_thread(load_tower, Path(model.path), dtype, config.encoder.device)
    blobs = await context.open_blobs()
    embeddings = EmbeddingStore(context.bus, blobs, config, name, "producer")
    thread = TowerThread(tower, config.encoder.max_batch_tokens)
    await EncoderWorker(context, name, thread, blobs, embeddings).serve()


class EncoderWorker:
    def __init__(
        self,
        context: Context,
        model: str,
        tower: TowerThread,
        blobs: Blobs,
        embeddings: EmbeddingStore,
    ) -> None:
        self._context = context
        self._stage = context.stage
        self._model = model
        self._tower = tower
        self._blobs = blobs
        self._embeddings = embeddings
        self._in_hand: set[Job] = set()
        self._found = 0

    async def serve(self) -> None:
        context = self._context
        self._tell_metrics()
        consumers = [await self._consume(lane) for lane in subjects.LANES]
        context.ready([self._model], lambda: self._load(consumers))
        beside = [asyncio.create_task(work) for work in (self._tower.work(), self._watch())]
        try:
            drain_s = context.config.delivery.drain_s
            async with asyncio.TaskGroup() as group:
                for consumer in consumers:
                    group.create_task(serve(consumer, self._handle, context.shutdown, drain_s))
        finally:
            for task in beside:
                task.cancel()
            self._tower.close()

    def _tell_metrics(self) -> None:
        metrics, tower = self._context.metrics.of(self._model), self._tower
        tower.on_batch = metrics.histogram("encoder_batch_items").observe
        metrics.set_function("encoded_items_total", lambda: tower.num_encoded)
        metrics.set_function("encoder_waiting_items", lambda: tower.num_waiting)
        metrics.set_function("encoder_found_items_total", lambda: self._found)

    async def _consume(self, lane: str) -> Consumer:
        context = self._context
        return await context.bus.consume(
            subjects.STAGES_STREAM,
            subjects.stage_consumer(context.role, self._model, lane),
            subjects.stage_filter(context.role, self._model, lane),
            context.config.encoder.max_tasks,
            context.config.delivery.ack_wait_s,
        )

    def _load(self, consumers: list[Consumer]) -> dict[str, float]:
        return {
            "held": sum(consumer.num_in_flight for consumer in consumers),
            "waiting": self._tower.num_waiting,
            "encoded": self._tower.num_encoded,
            "batches": self._tower.num_batches,
            "found": self._found,
        }

    async def _watch(self) -> None:
        """A batch may take a while, and all that wait are nearer to their turn by it; but one that
        never ends would keep this encoder taking work that it never does."""
        while True:
            await asyncio.sleep(WATCH_S)
            self._stage.progressed(self._in_hand)
            if self._tower.batch_s > self._context.config.encoder.step_timeout_s:
                self._context.log.error("batch_hangs")
                # Nothing stops a thread. What is in hand comes to another encoder.
                os._exit(1)

    async def _handle(self, delivery: Delivery) -> None:
        job = self._stage.receive(delivery)
        if job is None:
            return
        self._in_hand.add(job)
        try:
            await self._encode(job)
        except asyncio.CancelledError:
            await self._stage.requeue(job)
            raise
        except Exception as error:
            await self._stage.fail(job, error)
        finally:
            self._in_hand.discard(job)

    async def _encode(self, job: Job) -> None:
        task, tensors = envelope.decode(job.delivery.data, EncodeTask)
        if task.item.blob is not None:
            job.inputs = [task.item.blob]
        await self._forgive(task.key, job.delivery.attempt)
        if await self._stage.claim(job) is None:
            return
        if await self._embeddings.find_again(task.key, task.item.mm_hash):
            self._found += 1
        elif (embedding := await self._make(task, tensors)) is not None:
            await self._keep(task, embedding)
            self._log_encoded(job, task)
        else:
            await self._stage.close_attempt(job)
            await self._stage.finish(job)
            return
        # The next task of this name is not to answer for the attempts at this one, which ended
        # well, when those who made them have gone home.
        name = subjects.encoding(task.key)
        await self._context.bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(name))
        await self._stage.finish(job)

    async def _make(self, task: EncodeTask, tensors: list[TensorData]) -> Tensor | None:
        """None if nobody waits any more, or the picture is lost: whoever waits all the same sees
        that nobody is about to make it, and sends it again."""
        if self._context.bus.now_ms() >= task.expires_ms:
            return None
        try:
            fields, blob = await mm_items.open_item(self._blobs, task.item, tensors)
        except BlobLost:
            self._context.log.warning("picture_lost", key=task.key)
            return None
        try:
            restored = {name: to_torch(tensor) for name, tensor in fields.items()}
            return await self._tower.encode(restored)
        finally:
            if blob is not None:
                blob.close()

    async def _keep(self, task: EncodeTask, embedding: Tensor) -> None:
        """Wait for room as long as somebody waits for them: to give the task back would be to make
        them again. What is in hand meanwhile keeps this encoder from taking more."""
        while True:
            try:
                await self._embeddings.put(task.key, task.item.mm_hash, embedding)
                return
            except Overloaded:
                if self._context.bus.now_ms() >= task.expires_ms:
                    raise
            await asyncio.sleep(ROOM_PAUSE_S)

    async def _forgive(self, key: str, attempt: int) -> None:
        """What an earlier task for this picture has failed of may be over by now. A picture that
        cannot be encoded, or that encoders die of, stays refused as long as that is remembered."""
        if attempt > 1:
            return
        name = subjects.encoding(key)
        record = await last_record(self._context.bus, name)
        if isinstance(record, Failure) and record.error.retryable:
            for stream, subject in (
                (subjects.ATTEMPTS_STREAM, subjects.attempts(name)),
                (subjects.TOKENS_STREAM, subjects.tokens(name)),
            ):
                await self._context.bus.purge(stream, subject)

    def _log_encoded(self, job: Job, task: EncodeTask) -> None:
        self._context.log.info(
            "encoded",
            key=task.key,
            attempt=job.delivery.attempt,
            tokens=task.item.placeholder.length,
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
