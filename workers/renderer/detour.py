"""Detours: selects the requests that go to prefill workers before the engine, and forwards the
queue of these workers when none is left.

A request makes a detour only if its prompt is long and a prefill worker has no backlog. When the
last prefill worker has gone, renderers forward the waiting tasks unchanged.
"""

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Iterable

from shared.bus.bus import Bus
from shared.codec.envelope import TensorData
from shared.config.schema import Config
from shared.errors import Unavailable
from shared.protocol.messages import Heartbeat
from shared.protocol.pipeline import Edge
from shared.protocol.task_messages import EngineBody, Task, TaskHeader
from shared.stage.job import Job
from shared.stage.runtime import VERSION, Context
from shared.stage.stage import Stage
from shared.stage.worker_loop import Forward, Outcome, WorkerLoop

MAX_AGE_S = 1.0
"""A worker gets no further requests while its oldest task is older."""
BEATS_TTL_S = 1.0
"""Time for which heartbeats are cached: workers send one every second."""
MAX_SENT = 4
"""Limit on the requests that one renderer sends to each worker between two heartbeats."""
WATCH_S = 1.0
GONE_S = 2.0
"""Time without a heartbeat of any prefill worker after which renderers forward the waiting tasks. A
renderer may not have read a heartbeat yet if it, or the broker, has just started."""
FORWARDED_AT_ONCE = 8


class Detours:
    """Detours that begin at one renderer's stage, by model."""

    def __init__(self, context: Context, models: Iterable[str]) -> None:
        self._bus: Bus = context.bus
        self._config: Config = context.config
        self._edges: dict[str, Edge] = {}
        for model in models:
            edge = context.pipelines[model].detour_from(context.stage.name)
            if edge is not None:
                self._edges[model] = edge
        self._context = context
        self._beats: list[Heartbeat] | None = None
        """None while the broker does not answer."""
        self._beats_until_s = 0.0
        self._num_sent: Counter[str] = Counter()
        """Requests on detours since these heartbeats, by model."""

    async def suits(self, header: TaskHeader, body: EngineBody, job: Job) -> bool:
        """Return whether the request goes to a prefill worker first.

        It does not if the engine has to compute the prompt in any case, or if this is another
        attempt, because a prefill worker may have the request already.
        """
        edge, sampling = self._edges.get(header.model), header.sampling
        if edge is None or header.embedding is not None or sampling.prompt_logprobs is not None:
            return False
        again = job.delivery.attempt > 1 or header.round > 0
        if again or sampling.skip_reading_prefix_cache:
            return False
        if len(body.prompt_token_ids) < self._config.models[header.model].min_prefill_tokens:
            return False
        workers = await self._workers(edge, header.model)
        num_free = sum(beat.load.get("oldest_s", 0.0) < MAX_AGE_S for beat in workers)
        # The heartbeats do not include the work of requests that were sent since.
        if self._num_sent[header.model] >= num_free * MAX_SENT:
            return False
        self._num_sent[header.model] += 1
        return True

    async def _workers(self, edge: Edge, model: str) -> list[Heartbeat]:
        """Return the heartbeats of the detour's workers that accept tasks."""
        now_s = time.monotonic()
        if now_s > self._beats_until_s:
            self._beats_until_s = now_s + BEATS_TTL_S
            self._num_sent.clear()
            try:
                self._beats = await self._bus.heartbeats.read()
            except Unavailable:
                self._beats = None
        return [
            beat
            for beat in self._beats or []
            if (beat.stage or beat.role) == edge.target
            and model in beat.models
            and not beat.load.get("draining")
        ]

    async def run(self) -> None:
        """Forward the tasks of detours that have no workers, until the renderer stops."""
        stages: dict[str, list[str]] = {}
        for model, edge in self._edges.items():
            stages.setdefault(edge.target, []).append(model)
        async with asyncio.TaskGroup() as group:
            for stage, models in stages.items():
                group.create_task(self._forward_abandoned(stage, models))

    async def _forward_abandoned(self, stage: str, models: list[str]) -> None:
        ours = self._context
        context = copy.copy(ours)
        context.stage = Stage(
            ours.bus,
            stage,
            ours.worker,
            VERSION,
            ours.config.delivery,
            ours.metrics,
            ours.pipelines,
            ours.stage.blobs,
        )
        loop = WorkerLoop(context)
        await loop.add_stage(models, 0, EngineBody, _forward)
        watching = asyncio.create_task(self._watch(loop))
        try:
            await loop.run()
        finally:
            watching.cancel()

    async def _watch(self, loop: WorkerLoop) -> None:
        """Claim tasks of a model only while it has no prefill worker."""
        seen_s = dict.fromkeys((model for model, _ in loop.consumers), time.monotonic())
        while True:
            for model in seen_s:
                if await self._workers(self._edges[model], model) or self._beats is None:
                    seen_s[model] = time.monotonic()
            for (model, _), consumer in loop.consumers.items():
                is_gone = time.monotonic() - seen_s[model] > GONE_S
                consumer.set_capacity(FORWARDED_AT_ONCE if is_gone else 0)
            await asyncio.sleep(WATCH_S)


async def _forward(task: Task[EngineBody], tensors: list[TensorData], job: Job) -> Outcome:
    return Forward(task.body, tensors)
