"""The command `pagemill worker`: one worker in this process."""

import gc
import importlib
import os
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import uvloop
from cyclopts import App, Parameter

from shared.config.schema import Config
from shared.errors import ConfigError
from shared.models.lazy_module import hide_torch
from shared.stage import runtime
from shared.stage.listeners import Listeners, Section
from workers import settings
from workers.cli.models.local import check_endpoint
from workers.cli.options import ConfigFile, NatsUrl, check_role
from workers.cli.terminal import print_refusal, run_app
from workers.roles import GATEWAY, POOL, WorkerSpec, device_needs, role_of
from workers.supervisor import pool as pool_worker
from workers.supervisor.preloader import Preloader, fork_preloader
from workers.supervisor.processes import WorkerProcesses


def worker(
    role: Annotated[str, Parameter(validator=check_role)],
    /,
    *,
    model: str | None = None,
    stage: str | None = None,
    pool: str | None = None,
    roles: str | None = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Run one worker until SIGTERM, Ctrl-C or the end of its terminal drains it.

    The exit code is 78 for a configuration that cannot work.

    Parameters
    ----------
    role
        The kind of worker: coordinator, renderer, encoder, prefill, engine, generator, agent,
        autoscaler, pool or gateway.
    model
        The model that a worker of a stage serves; needed only when several are configured.
    stage
        The stage of the model's pipeline that the worker serves; by default the one named like its
        role, or else the only one of this role.
    pool
        The pool of the model's engines to which the worker belongs, if there are several.
    roles
        The roles whose workers a pool starts and stops, such as `engine,encoder`.
    """
    try:
        # transformers imports the hub's library.
        check_endpoint()
        file = settings.find_config_file(config)
        spec = WorkerSpec(role, model, stage, pool)
        loaded = settings.load_for(spec, file)
        login = settings.login_of(loaded, role, nats)
        if role == POOL:
            settings.check_paths(loaded)
            names = pool_worker.read_roles(roles, loaded, nats)
        elif roles is not None:
            raise ConfigError("--roles belongs to the role `pool`", field="roles")
        listeners = _bind(loaded, role)
    except ConfigError as error:
        print_refusal(error)
        return runtime.EXIT_CONFIG
    if model is None and len(loaded.models) == 1:
        model = next(iter(loaded.models))
    # Idle threads of torch would otherwise spin, and take the processors from the engine's own
    # kernels and from other workers. torch reads the variable at its import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    reread = partial(settings.reload_for, spec, config)
    main = _prepare_pool(loaded, names, file, nats) if role == POOL else load_main(role)
    running = runtime.run(role, main, loaded, login, model, stage, reread, listeners, pool)
    return uvloop.run(running)


def _prepare_pool(
    config: Config, roles: Sequence[str], file: Path | None, nats: str | None
) -> runtime.Main:
    """Return the `main` of a pool that starts and stops workers of these roles."""
    workers, pools = pool_worker.plan_workers(config, roles)
    # Forked before torch is hidden from this process.
    preloader = preload(config, [*workers, *(scaled.spec for scaled in pools)])
    processes = WorkerProcesses(file, nats, preloader=preloader)
    return partial(load_main(POOL), roles=roles, processes=processes)


def _bind(config: Config, role: str) -> Listeners:
    """Bind the sockets of a worker before its modules are imported."""
    listeners = Listeners(config)
    # The preloader of a pool, which is forked first, would keep the pool's socket open.
    if role != POOL:
        sections: list[Section] = ["metrics"]
        if role == GATEWAY:
            sections.append("gateway")
        if role_of(role).has_blobs:
            sections.append("blobs")
        listeners.bind(*sections)
    return listeners


def load_main(role: str) -> Callable[..., Awaitable[None]]:
    """Import the module of a role, in the process that is to run it, and return its `main`."""
    spec = role_of(role)
    if not spec.uses_torch and not spec.may_load_torch:
        # A renderer needs the tokenizers and image processors of transformers.
        hide_torch()
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        # A renderer already runs as many threads as it may use. OpenBLAS would split each of their
        # products over more threads, whose idle spinning slows down images while a video is
        # resized. It reads the variable when numpy is imported.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # An import of transformers creates millions of permanent objects. Collections of them free
    # nothing, take a seventh of the time of the import, and 0.2 s each after it.
    gc.disable()
    try:
        main: Callable[..., Awaitable[None]] = importlib.import_module(spec.module).main
    finally:
        gc.freeze()
        gc.enable()
    return main


def preload(config: Config, specs: Sequence[WorkerSpec]) -> Preloader | None:
    """Return a process that has imported the modules of all roles that use torch."""
    # Workers on GPUs are not forked.
    roles = [role_of(spec.role) for spec in specs if device_needs(config, spec) is None]
    modules = sorted({role.module for role in roles if role.uses_torch})
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return fork_preloader(modules, _run_forked) if modules else None


def _run_forked() -> None:
    """Run the command line of a worker that has been forked."""
    forked = App(name="pagemill")
    forked.command(worker)
    run_app(forked)
