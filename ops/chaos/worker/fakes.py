"""A renderer and an engine without transformers and torch, for short runs."""

import os
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

from ops.chaos import fake_model
from ops.chaos.history import Journal, WorkerEvent, now
from ops.chaos.plan import MODEL
from shared.stage import runtime
from shared.stage.runtime import Context
from workers.engine.core.engine import EngineCore
from workers.engine.core.engine_stats import EngineStats

Role = Literal[
    "coordinator",
    "renderer",
    "encoder",
    "engine",
    "generator",
    "gateway",
    "batcher",
    "autoscaler",
]


def make_engine_main(journal: Journal, step_ms: float) -> runtime.Main:
    """Return the `main` of an engine that computes its tokens without a model."""

    def allows_harm(seed: int, id: str) -> bool:
        if seed == fake_model.HANGS_SEED and not _is_first(id):
            return False
        journal.write(WorkerEvent(now(), "harm", id, seed))
        return True

    async def main(context: Context) -> None:
        from workers.engine.item_loader import ItemLoader
        from workers.engine.stage_output import StageOutput, TextOutput
        from workers.engine.worker import EngineWorker

        output: StageOutput
        limits, stage = context.config.engine, context.pipelines[MODEL].stage(context.stage.name)
        num_blocks, output = limits.num_blocks or 256, TextOutput()
        if stage is not None and stage.voices:
            core = fake_model.build_talker(step_ms / 1000, num_blocks, limits.max_num_seqs)
            chunks = [*context.pipelines[MODEL].chunks_behind(stage.name).values()]
            output = fake_model.code_output(context.bus, stage, chunks)
        else:
            runner = fake_model.FakeRunner(step_ms / 1000, allows_harm)
            core = fake_model.build_core(
                runner, num_blocks, limits.max_num_seqs, runs_ahead=limits.steps_ahead == 1
            )
        _watch_blocks(core, journal)
        opener = ItemLoader(await context.open_blobs(), None, lambda data: data)
        await EngineWorker(context, MODEL, core, opener, output=output).serve()

    return main


def make_painter_main(step_ms: float) -> runtime.Main:
    """Return the `main` of a generator that paints without a network."""

    async def main(context: Context) -> None:
        from ops.chaos.fake_painter import FakePainter
        from workers.generator.image_results import ImageResults
        from workers.generator.image_thread import ImageThread
        from workers.generator.image_worker import ImageWorker

        painter, limits = FakePainter(step_ms / 1000), context.config.generator
        thread = ImageThread(painter, limits.max_images)
        results = ImageResults(context.bus, limits.result_ttl_s)
        await ImageWorker(context, MODEL, thread, painter, "fake", results).serve()

    return main


def stand_in_processor() -> None:
    """Replace the renderer's processor module, which takes 2 s to import, by the fake one."""
    name = "workers.renderer.processing.processor"
    module = ModuleType(name)
    vars(module).update(
        Processor=fake_model.FakeProcessor,
        ProcessedImage=object,
        Rendered=fake_model.FakeRendered,
        join=fake_model.FakeRendered,
    )
    sys.modules[name] = module


def _is_first(id: str) -> bool:
    """Return whether this is the first engine of the run to report harm by the request."""
    try:
        (Path(os.environ["CHAOS_DIR"]) / f"first-{id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _watch_blocks(core: EngineCore, journal: Journal) -> None:
    """Record a leak when, after a step, blocks are in use while no sequence runs."""
    stats_of = core.stats

    def stats() -> EngineStats:
        stats = stats_of()
        num_used = stats.num_blocks - stats.num_free_blocks
        if num_used and not stats.num_running:
            journal.write(WorkerEvent(now(), "leak", at=num_used))
        return stats

    setattr(core, "stats", stats)  # noqa: B010
