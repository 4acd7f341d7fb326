"""One worker of a run: the product's own `main`, observed and disturbed from outside.

Environment variables control it: CHAOS_DIR is the folder of the journal, CHAOS_CRASH lists crash
points, CHAOS_BUG names a planted bug, CHAOS_ALTERATION names an alteration of the fault matrix, and
CHAOS_SEED seeds random choices. The product's methods are wrapped; the product has no switches for
tests.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import App, Parameter
from msgspec.structs import replace

from ops.chaos import alterations
from ops.chaos.bugs import catalog
from ops.chaos.history import Journal, WorkerEvent, now
from ops.chaos.plan import MODEL
from ops.chaos.worker import fakes, observer
from ops.chaos.worker.crash_points import CrashPoints, parse_chances
from ops.chaos.worker.fakes import Role
from ops.chaos.worker.resources import take_snapshot
from shared.stage import runtime
from shared.stage.runtime import Context
from workers import settings
from workers.cli.commands.worker import load_main

app = App(name="chaos-worker")


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
    stage: str | None = None,
) -> int:
    """Run one worker.

    Parameters
    ----------
    fake
        Run without a model.
    step_ms
        Duration of a step of the fake engine.
    port
        Port of a gateway.
    stage
        The stage to serve. The worker has its name in the run; by default the name of the role.
    """
    name = stage or role
    journal = Journal(Path(os.environ["CHAOS_DIR"]) / f"{name}-{os.getpid()}.jsonl")
    crash = CrashPoints(
        parse_chances(os.environ.get("CHAOS_CRASH", ""), name),
        os.environ.get("CHAOS_SEED", ""),
        lambda point: journal.write(WorkerEvent(now(), f"crash {point}")),
    )
    loaded = settings.load_config(config)
    if port is not None:
        loaded = replace(loaded, gateway=replace(loaded.gateway, port=port))
    role_main = prepare(role, journal, crash, fake, step_ms)
    catalog.plant(os.environ.get("CHAOS_BUG", ""), name)

    async def observed(context: Context) -> None:
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(
            signal.SIGUSR2, lambda: journal.write(take_snapshot(name, context.bus))
        )
        await role_main(context)

    journal.write(WorkerEvent(now(), "start"))
    model = MODEL if role in ("encoder", "engine", "generator") else None
    login = settings.login_of(loaded, role, nats)
    return uvloop.run(runtime.run(role, observed, loaded, login, model, stage))


def prepare(
    role: Role, journal: Journal, crash: CrashPoints, fake: bool, step_ms: float
) -> runtime.Main:
    """Alter and wrap the product, without a bug, and return the `main` of a role."""
    alterations.apply(os.environ.get("CHAOS_ALTERATION", ""))
    if fake and role == "engine":
        role_main: runtime.Main = fakes.make_engine_main(journal, step_ms)
    elif fake and role == "generator":
        role_main = fakes.make_painter_main(step_ms)
    else:
        if fake and role == "renderer":
            fakes.stand_in_processor()
        role_main = load_main(role)
    observer.watch(journal, crash)
    return role_main
