"""Encoder: converts images to embeddings. It has a tower and no language model.

An image is encoded once for all requests with it, because its task has a subject that is derived
from the image, and embeddings that were computed before are reused.
"""

import asyncio
import os
from pathlib import Path

import torch
from torch import Tensor

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.codec.envelope import TensorData
from shared.codec.tensors import to_torch
from shared.config.schema import EncoderConfig, ModelConfig
from shared.errors import BlobLost, ConfigError, Overloaded
from shared.gpu.allocator import limit_memory
from shared.gpu.meter import measure_gpu
from shared.models.tower import Tower, dtype_of_folder, load_tower
from shared.models.tower_thread import TowerThread
from shared.protocol.task_messages import EncodeBody, Task
from shared.stage.job import Job
from shared.stage.runtime import Context
from shared.stage.worker_loop import Abandoned, Done, Outcome, WorkerLoop
from shared.vision.embedding_store import EmbeddingStore
from shared.vision.weights_progress import WeightsProgress

WATCH_S = 0.5
# Interval at which an encoder tries again to store embeddings while there is no room.
ROOM_PAUSE_S = 0.25


async def main(context: Context) -> None:
    config, name = context.config, context.model
    if name is None:
        raise ConfigError("an encoder serves one model: name it with --model", field="model")
    if config.encoder.threads:
        torch.set_num_threads(config.encoder.threads)
    model = config.models[name]
    context.step("loading the tower", WeightsProgress(Path(model.path)).measure)
    limit_memory(config.encoder)
    measure_gpu(config.encoder, context.metrics.of(name))
    tower = await asyncio.to_thread(_load_tower, model, config.encoder)
    blobs = await context.open_blobs()
    embeddings = EmbeddingStore(context.bus, blobs, config, name, "producer")
    thread = TowerThread(tower, config.encoder.max_batch_tokens)
    await EncoderWorker(context, name, thread, blobs, embeddings).serve()


def _load_tower(model: ModelConfig, encoder: EncoderConfig) -> Tower:
    folder = Path(model.path)
    dtype = dtype_of_folder(folder, model.dtype, encoder.device)
    return load_tower(folder, dtype, encoder.device, encoder.kernels)


class EncoderWorker:
    """Encodes the items of tasks in a tower thread, and stores their embeddings."""

    def __init__(
        self,
        context: Context,
        model: str,
        tower: TowerThread,
        blobs: Blobs,
        embeddings: EmbeddingStore,
    ) -> None:
        self._context = context
        self._model = model
        self._tower = tower
        self._blobs = blobs
        self._embeddings = embeddings
        self._in_flight: set[Job] = set()
        self._num_reused = 0

    async def serve(self) -> None:
        context = self._context
        loop = WorkerLoop(context)
        self._register_metrics()
        await loop.add_stage(
            [self._model], context.config.encoder.max_tasks, EncodeBody, self._handle
        )
        context.ready([self._model], lambda: self._load(loop))
        loop.depend_on(self._tower.work())
        loop.depend_on(self._watch())
        try:
            await loop.run()
        finally:
            self._tower.close()

    def _register_metrics(self) -> None:
        metrics, tower = self._context.metrics.of(self._model), self._tower
        tower.on_batch = metrics.histogram("encoder_batch_items").observe
        metrics.set_function("encoded_items_total", lambda: tower.num_encoded)
        metrics.set_function("encoder_waiting_items", lambda: tower.num_waiting)
        metrics.set_function("encoder_found_items_total", lambda: self._num_reused)

    def _load(self, loop: WorkerLoop) -> dict[str, float]:
        return {
            "held": loop.num_claimed,
            "waiting": self._tower.num_waiting,
            "encoded": self._tower.num_encoded,
            "batches": self._tower.num_batches,
            "found": self._num_reused,
        }

    async def _watch(self) -> None:
        """Report progress while batches advance, and end the process when a batch hangs.

        Every batch shortens the wait of all waiting items. With a batch that hangs, this encoder
        would continue to claim tasks that it cannot complete.
        """
        while True:
            await asyncio.sleep(WATCH_S)
            self._context.stage.claims.progressed(self._in_flight)
            if self._tower.batch_s > self._context.config.encoder.step_timeout_s:
                self._context.log.error("batch_hangs")
                # A thread cannot be stopped. The claimed tasks are delivered to another encoder.
                os._exit(1)

    async def _handle(self, task: Task[EncodeBody], tensors: list[TensorData], job: Job) -> Outcome:
        self._in_flight.add(job)
        job.running = True
        try:
            body = task.body
            if await self._embeddings.find_again(body.key, body.item.mm_hash):
                self._num_reused += 1
                return Done()
            embedding = await self._encode(body, task.header.expires_ms, tensors)
            if embedding is None:
                return Abandoned()
            await self._store(body, task.header.expires_ms, embedding)
            self._log_encoded(job, body)
            return Done()
        finally:
            self._in_flight.discard(job)

    async def _encode(
        self, body: EncodeBody, expires_ms: float, tensors: list[TensorData]
    ) -> Tensor | None:
        """Return the item's embeddings; None if all requests have expired, or the payload is lost.

        A request that still waits then finds no task for its item, and the item is rendered again.
        """
        if self._context.bus.now_ms() >= expires_ms:
            return None
        try:
            fields, blob = await mm_items.open_item(self._blobs, body.item, tensors)
        except BlobLost:
            self._context.log.warning("image_lost", key=body.key)
            return None
        try:
            restored = {name: to_torch(tensor) for name, tensor in fields.items()}
            return await self._tower.encode(restored)
        finally:
            if blob is not None:
                blob.close()

    async def _store(self, body: EncodeBody, expires_ms: float, embedding: Tensor) -> None:
        """Store embeddings. Waits for room until the last request has expired.

        If the task were requeued, they would be computed again. Tasks that wait here keep this
        encoder from claiming more.
        """
        while True:
            try:
                await self._embeddings.put(body.key, body.item.mm_hash, embedding)
                return
            except Overloaded:
                if self._context.bus.now_ms() >= expires_ms:
                    raise
            await asyncio.sleep(ROOM_PAUSE_S)

    def _log_encoded(self, job: Job, body: EncodeBody) -> None:
        self._context.log.info(
            "encoded",
            key=body.key,
            attempt=job.delivery.attempt,
            tokens=body.item.placeholder.length,
            ms=round(self._context.bus.now_ms() - job.received_ms, 1),
        )
