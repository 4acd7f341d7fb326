"""Preloaders of a run, which fork its workers.

`pagemill up` forks only workers that use torch. A run forks all workers, because it kills a worker
every second, and imports would take most of the processor time.
"""

import sys

from ops.chaos.plan import PAINTER, TALKER, VOCODER, Settings
from shared.stage.graphs import PARTS
from workers.roles import AUTOSCALER, BATCHER, role_of
from workers.supervisor.preloader import Preloader, fork_preloader

MAIN = "ops.chaos.worker.watched_worker"
LIGHT = "ops.chaos.worker.light"
GENERATOR = ("workers.generator.loader", "workers.generator.speech_worker")
FAKE_PAINTER = ("ops.chaos.fake_painter", "workers.generator.image_worker")
PAINTING = (
    "workers.generator.image_worker",
    "workers.generator.painter_model",
    "workers.generator.diffusion.qwen_image",
)
FAKE_ENGINE = ("workers.engine.item_loader", "workers.engine.worker")


def fork_preloaders(settings: Settings) -> dict[str, Preloader]:
    """Return the preloader of each role; only a process without threads may call this."""
    modules = [LIGHT, MAIN]
    if settings.renderer != "fake":
        modules.append(role_of("renderer").module)
    if settings.engine == "fake":
        modules += FAKE_ENGINE
    if settings.vocoders:
        modules += GENERATOR
    if settings.painters:
        modules += FAKE_PAINTER
    if settings.batchers:
        modules.append(role_of(BATCHER).module)
    if settings.scaled is not None:
        modules.append(role_of(AUTOSCALER).module)
    light = fork_preloader(modules, _run_worker)
    roles = ("coordinator", "renderer", "gateway", "encoder", "engine", BATCHER, AUTOSCALER)
    preloaders = dict.fromkeys((*roles, TALKER, VOCODER, PAINTER, *PARTS), light)
    if settings.engine != "fake":
        modules = [*(role_of(role).module for role in ("encoder", "engine")), MAIN]
        if settings.painters:
            modules += PAINTING
        using_torch = fork_preloader(modules, _run_worker)
        preloaders |= dict.fromkeys(("encoder", "engine", TALKER, PAINTER, *PARTS), using_torch)
    return preloaders


def fork_engine_preloader() -> Preloader:
    """Return the preloader of fake engines; only a process without threads may call this."""
    return fork_preloader([LIGHT, MAIN, *FAKE_ENGINE], _run_worker)


def _run_worker() -> None:
    from ops.chaos.worker.watched_worker import app

    sys.exit(app(result_action="return_value"))
