"""Cores and workers of engines, with defaults for what a test does not depend on."""

import asyncio
import contextlib
import dataclasses
import secrets
import threading
from collections.abc import AsyncIterator, Iterable, Sequence
from typing import Any

import structlog
from msgspec.structs import replace

from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec import envelope
from shared.config.schema import BlobsConfig, Config, EngineConfig, ModelConfig
from shared.protocol import subjects
from shared.protocol.sampling import SamplingParams, StructuredOutputs
from shared.protocol.task_messages import RequestTicket
from shared.stage.runtime import Context
from shared.stage.worker_loop import WorkerLoop
from tests.fakes import FakeLaunched, FakeRunner
from tests.support.waiting import until
from tests.support.workers import Announcement
from tests.tasks import engine_task
from workers.engine.code_lead import CodeLead
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.request_state import Decode
from workers.engine.core.sequence import Batch, RequestOutput, SampledToken
from workers.engine.core.step_runner import StepRunner
from workers.engine.item_loader import ItemLoader
from workers.engine.log_records import merge_deltas
from workers.engine.open_request import RecordPacer
from workers.engine.stage_output import StageOutput, TextOutput
from workers.engine.worker import EngineWorker


def one_letter_each(token_ids: list[int], **_: object) -> str:
    return "x" * len(token_ids)


def spell(token_ids: list[int], **_: object) -> str:
    """Decode tokens as their numbers, each with a space after it."""
    return "".join(f"{token_id} " for token_id in token_ids)


class CoreWithText(EngineCore):
    """Makes the text of each step at once, as if each step had a record in the log."""

    def step(self) -> list[RequestOutput]:
        return [
            dataclasses.replace(output, choices=merge_deltas([output]), texts=[])
            for output in super().step()
        ]


def make_core(
    runner: StepRunner,
    pool: BlockPool,
    vocab_size: int,
    *,
    decode: Decode = one_letter_each,
    eos: Iterable[int] = (),
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    **options: Any,
) -> EngineCore:
    """Return a core that takes 8 requests and 64 tokens a step; `options` are EngineCore's.

    Its outputs have their text.
    """
    return CoreWithText(
        runner,
        decode,
        frozenset(eos),
        pool=pool,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        **options,
    )


def run_batch(runner: StepRunner, batch: Batch) -> list[list[SampledToken]]:
    """Launch a batch, sample the tokens of all its sequences and return them."""
    launched = runner.launch(batch)
    launched.sample(range(len(batch.scheduled)))
    return launched.result()


class StepwiseRunner(FakeRunner):
    """Runner each of whose steps waits until the test releases `go_on`."""

    def __init__(self) -> None:
        super().__init__(block_size=2, vocab_size=50)
        self.go_on = threading.Semaphore(0)
        self.served: dict[str, None] = {}
        """Requests in the order in which they have begun."""

    def launch(self, batch: Batch) -> FakeLaunched:
        self.go_on.acquire()
        self.served |= dict.fromkeys(s.sequence.request_id for s in batch.scheduled)
        return super().launch(batch)


class EngineRig:
    """A serving engine worker with a `StepwiseRunner`."""

    serving: asyncio.Task[None]

    def __init__(
        self, bus: Bus, model: str, worker: EngineWorker, runner: StepwiseRunner, context: Context
    ) -> None:
        self.bus, self.model = bus, model
        self.worker, self.runner, self.context = worker, runner, context
        self.announced = Announcement(context)

    def load(self) -> dict[str, float]:
        return self.announced.load()

    @property
    def loop(self) -> WorkerLoop:
        """Consumers and claimed jobs of the worker."""
        return self.worker._loop

    @property
    def pacer(self) -> RecordPacer:
        return self.worker._pacer

    def pull_load(self) -> float:
        """Return the load that sets the priority of pulls."""
        return self.worker._pull_load()

    def num_gathered(self, request_id: str) -> int:
        """Return the number of outputs that wait for the next record of a request."""
        opened = self.worker._requests.get(request_id)
        return len(opened.pending) if opened else 0

    @property
    def num_steps(self) -> int:
        """Number of steps whose outputs the worker has received."""
        metrics = self.context.metrics.of(self.model)
        return sum(metrics.histogram("iteration_tokens_total").counts)

    async def step(self) -> None:
        """Run one step, and wait until the worker has received its outputs."""
        num_steps = self.num_steps
        self.runner.go_on.release()
        while self.num_steps == num_steps:  # noqa: ASYNC110 - a step takes less than a pause
            await asyncio.sleep(0.001)

    async def until_held(self, count: int = 1) -> None:
        """Wait until `count` requests have begun here."""
        await until(lambda: self.load()["held"] >= count)

    async def put(
        self,
        name: str,
        prompt: list[int],
        *,
        lane: str = "batch",
        max_tokens: int = 8,
        structured_outputs: StructuredOutputs | None = None,
        outputs: Sequence[str] = (),
    ) -> None:
        """Publish a task of this engine."""
        sampling = SamplingParams(
            max_tokens=max_tokens, ignore_eos=True, structured_outputs=structured_outputs
        )
        ticket = RequestTicket(self.bus.now_ms(), self.bus.now_ms() + 60_000, 1, "pm.test.receipt")
        task = engine_task(name, prompt, [], sampling, model=self.model, lane=lane, ticket=ticket)
        task = replace(task, header=replace(task.header, outputs=[*outputs]))
        subject = subjects.stage("engine", self.model, lane, name)
        await self.bus.publish(subject, envelope.encode(task, []), name)


@contextlib.asynccontextmanager
async def serving_engine(
    bus: Bus,
    model: str,
    engine: EngineConfig | None = None,
    *,
    slots: int = 1,
    core: EngineCore | None = None,
    grammars: Any = None,
    kv: Any = None,
    output: StageOutput | None = None,
    lead: CodeLead | None = None,
    encoder: Any = None,
) -> AsyncIterator[EngineRig]:
    """Serve tasks of a model, which needs a name that no other test uses."""
    name, engine = f"engine-{secrets.token_hex(4)}", engine or EngineConfig()
    config = Config({model: ModelConfig("nowhere", slots=slots)}, engine=engine)
    context = Context("engine", name, model, config, bus, structlog.get_logger())
    runner = StepwiseRunner()
    core = core or make_core(
        runner,
        BlockPool(256, 2),
        50,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=512,
        max_model_len=512,
    )
    items = ItemLoader(
        Blobs(bus, "engine", name, BlobsConfig(arena_mib=1)), None, lambda data: data
    )
    worker = EngineWorker(
        context, model, core, items, grammars, kv, output or TextOutput(), lead, encoder
    )
    rig = EngineRig(bus, model, worker, runner, context)
    await bus.add_responder("pm.test.receipt", lambda receipt: b"+OK")
    rig.serving = serving = asyncio.create_task(worker.serve())
    await rig.announced.wait()
    try:
        yield rig
    finally:
        runner.go_on.release(1000)
        context.shutdown.asked.set()
        await serving
        await context.close()
