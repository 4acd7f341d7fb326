"""One worker of a run: the product's own `main`, watched and disturbed from outside.

The environment says how: CHAOS_DIR where to write down what happens, CHAOS_CRASH the crash points,
CHAOS_BUG a planted bug, CHAOS_SEED for chances. The product's methods are wrapped; it has no
switches for tests in it.
"""

import asyncio
import importlib
import os
import signal
import sys
from collections import Counter
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, Literal

from cyclopts import App, Parameter
from msgspec.structs import replace

from ops.chaos import bugs
from ops.chaos.history import Did, Journal, now
from ops.chaos.plan import MODEL
from ops.chaos.worker import payload_events
from ops.chaos.worker.crash_points import CrashPoints, parse_triggers
from ops.chaos.worker.resources import take_snapshot
from ops.chaos.worker.wrap import wrap
from shared.bus.bus import Bus
from shared.bus.consumer import Consumer, Delivery
from shared.protocol.messages import TokenChunk, to_json
from shared.stage import runtime
from shared.stage.runtime import Context
from workers.__main__ import ROLE_MODULES
from workers.cli import settings

Role = Literal["coordinator", "renderer", "encoder", "engine", "gateway"]
app = App(name="chaos-worker")

# How a record begins that is not the last of its log.
_TOKENS = to_json(TokenChunk(0, 0, [])).partition(b",")[0]


@app.default
def main(
    role: Role,
    /,
    *,
    config: Path,
    nats: Annotated[str, Parameter(name="--nats")],
    fake: bool = False,
    step_ms: float = 0.0,
    port: int | None = None,
) -> int:
    """`port`: of a gateway."""
    journal = Journal(Path(os.environ["CHAOS_DIR"]) / f"{role}-{os.getpid()}.jsonl")
    crash = CrashPoints(
        parse_triggers(os.environ.get("CHAOS_CRASH", ""), role),
        os.environ.get("CHAOS_SEED", ""),
        lambda point: journal.write(Did(now(), f"crash {point}")),
    )
    loaded = settings.load_config(config)
    if port is not None:
        loaded = replace(loaded, gateway=replace(loaded.gateway, port=port))
    role_main = _fake_main(role, journal, step_ms) if fake else _real_main(role)
    watch(journal, crash)
    bugs.plant(os.environ.get("CHAOS_BUG", ""), role)

    async def watched(context: Context) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGUSR2, lambda: journal.write(take_snapshot(context.role, context.bus))
        )
        await role_main(context)

    journal.write(Did(now(), "start"))
    model = MODEL if role in ("encoder", "engine") else None
    return runtime.run(role, watched, loaded, nats, model)


def _real_main(role: Role) -> runtime.Main:
    found: runtime.Main = importlib.import_module(ROLE_MODULES[role]).main
    return found


def _fake_main(role: Role, journal: Journal, step_ms: float) -> runtime.Main:
    """A renderer and an engine without transformers and torch; the coordinator is as it is."""
    from ops.chaos import fake_model

    if role == "engine":

        async def engine(context: Context) -> None:
            from workers.engine.item_loader import ItemLoader
            from workers.engine.worker import EngineWorker

            def allows_harm(seed: int, id: str) -> bool:
                if seed == fake_model.HANGS_SEED and not _is_first(id):
                    return False
                journal.write(Did(now(), "harm", id, seed))
                return True

            runner = fake_model.FakeRunner(step_ms / 1000, allows_harm)
            limits = context.config.engine
            core = fake_model.build_core(runner, limits.num_blocks or 256, limits.max_num_seqs)
            _watch_blocks(core, journal)
            opener = ItemLoader(await context.open_blobs(), None, lambda data: data)
            await EngineWorker(context, MODEL, core, opener).serve()

        return engine
    if role == "renderer":
        stand_in: Any = ModuleType("workers.renderer.processing.processor")
        stand_in.Processor, stand_in.Rendered = fake_model.FakeProcessor, fake_model.FakeRendered
        stand_in.ProcessedImage = object
        stand_in.join = fake_model.FakeRendered
        sys.modules[stand_in.__name__] = stand_in
    return _real_main(role)


def _is_first(id: str) -> bool:
    """Whether no worker of this run has asked this about this request before."""
    try:
        (Path(os.environ["CHAOS_DIR"]) / f"first-{id}").touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _watch_blocks(core: Any, journal: Journal) -> None:
    """After each step: what runs no sequence holds no block."""
    stats_of = core.stats

    def stats() -> Any:
        stats = stats_of()
        missing = stats.num_blocks - stats.num_free_blocks
        if missing and not stats.num_running:
            journal.write(Did(now(), "leak", at=missing))
        return stats

    core.stats = stats


def watch(journal: Journal, crash: CrashPoints) -> None:  # noqa: C901
    """Write down what the worker does, and let it die between any two steps."""

    def tell(what: str, id: str = "", at: int = 0) -> None:
        journal.write(Did(now(), what, id, at))

    announce = Context.ready

    def ready(self: Context, *args: Any) -> None:
        announce(self, *args)
        tell("ready")

    setattr(Context, "ready", ready)  # noqa: B010

    @wrap(Consumer, "next")
    async def next_(original: Any, self: Consumer) -> Delivery:
        delivery: Delivery = await original(self)
        tell("taken", _id_of(delivery), delivery.attempt)
        return delivery

    @wrap(Bus, "publish")
    async def publish(original: Any, self: Bus, subject: str, *args: Any, **named: Any) -> Any:
        hands_over = subject.startswith("pm.stage.")
        if hands_over:
            crash("before_publish")
        stored = await original(self, subject, *args, **named)
        if hands_over:
            crash("after_publish_before_ack")
        return stored

    @wrap(Delivery, "ack")
    async def ack(original: Any, self: Delivery) -> None:
        await original(self)
        tell("acked", _id_of(self), self.attempt)
        crash("after_ack")

    payload_events.watch(tell, crash)
    num_appended: Counter[str] = Counter()

    @wrap(Bus, "append")
    async def append(original: Any, self: Bus, subject: str, data: bytes, last: int) -> int:
        final = not data.startswith(_TOKENS)
        if final:
            crash("before_final")
        sequence: int = await original(self, subject, data, last)
        if final:
            crash("after_final_before_ack")
        else:
            num_appended[subject] += 1
            crash(f"mid_tokens:{num_appended[subject]}")
        return sequence


def _id_of(delivery: Delivery) -> str:
    return (delivery.msg_id or "").partition(":")[0]


if __name__ == "__main__":
    sys.exit(app(result_action="return_value"))
