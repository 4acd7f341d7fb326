"""Commands that run workers: `pagemill up` and `pagemill worker`."""

import gc
import importlib
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import uvloop
from cyclopts import App, Parameter
from cyclopts.validators import Number

from shared.config import Config
from shared.errors import ConfigError
from shared.models.lazy_module import hide_torch
from shared.stage import runtime
from workers.actuator import follow_plan
from workers.cli import settings
from workers.cli.commands.models import pull_model
from workers.cli.first_use import start_agent_on_first_use
from workers.cli.local_cluster import LocalCluster
from workers.cli.local_pools import LocalPools
from workers.cli.models.generated import Wishes, find_models, write_config
from workers.cli.models.local import check_endpoint, find_local, is_folder, missing_files
from workers.cli.options import ConfigFile, NatsUrl, check_role
from workers.cli.preloader import Preloader, fork_preloader
from workers.cli.terminal import errors, noted, print_refusal, run_app
from workers.cli.up import run_until_stopped
from workers.pools import pools_of, workers_of
from workers.roles import WorkerSpec, role_of

DType = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_HELP = "Type of the weights of these models; by default an exact one that fits."
QUANTIZATION_HELP = "Load the decoders' weights as int8: less memory, and answers that differ."


def up(
    *models: str,
    config: ConfigFile = None,
    nats: NatsUrl = None,
    pull: bool = False,
    dtype: Annotated[DType | None, Parameter(help=DTYPE_HELP)] = None,
    max_model_len: Annotated[int | None, Parameter(validator=Number(gt=0))] = None,
    quantization: Annotated[Literal["int8"] | None, Parameter(help=QUANTIZATION_HELP)] = None,
) -> int:
    """Run all roles on this machine, with an embedded nats-server unless one is configured.

    Ctrl-C drains: workers finish or requeue the requests in flight before they end. A second Ctrl-C
    makes them requeue at once. The workers' log is appended to a file, see `pagemill logs`. The
    exit code is 78 for a configuration that will never work.

    Parameters
    ----------
    models
        Serve these models without a configuration file: names in the hub's cache, or folders. The
        KV cache and the context are chosen from the memory that is available.
    pull
        Download those models that are not in the cache.
    max_model_len
        Limit on prompt and answer together, in tokens, of these models.
    """
    try:
        check_endpoint()
        wishes = Wishes(dtype, max_model_len, quantization)
        if models:
            config = _generate(models, config, wishes, pull)
        elif pull or wishes != Wishes():
            raise ConfigError(
                "--pull, --dtype, --max-model-len and --quantization belong to models that are"
                " named on the command line",
                field="models",
            )
        file = settings.find_config_file(config)
        loaded = settings.load_config(file)
        settings.check_paths(loaded)
        pools = pools_of(loaded)
        workers = [*workers_of(loaded, pools), WorkerSpec("gateway")]
        log_file = settings.find_log_file(loaded)
        # The workers of a pool at zero are forked from the same process when they are wanted.
        specs = [*workers, *(pool.spec for pool in pools.by_name.values())]
        cluster = LocalCluster(
            loaded, file, workers, nats, log_file, preloader=preload(loaded, specs)
        )
        if pools.by_name:
            local = LocalPools(cluster, pools)
            cluster.follow = lambda bus: follow_plan(bus, local)
        cluster.when_ready = lambda bus: start_agent_on_first_use(bus, cluster)
        return uvloop.run(run_until_stopped(cluster, loaded))
    except ConfigError as error:
        print_refusal(error)
        return runtime.EXIT_CONFIG


def _generate(models: Sequence[str], config: Path | None, wishes: Wishes, may_pull: bool) -> Path:
    """Write the configuration of these models, and return its file. Raises PagemillError."""
    if config is not None:
        raise ConfigError(
            f"models and --config exclude each other: add the models to {config}", field="config"
        )
    if may_pull:
        for name in models:
            if is_folder(name):
                continue
            if (model := find_local(name)) is None or missing_files(model.folder):
                pull_model(name)
    found = find_models(models)
    with noted(f"checking whether {', '.join(model.name for model in found)} can be served …"):
        file, lines = write_config(found, wishes)
    for line in lines:
        errors.print(line, highlight=False, markup=False, soft_wrap=True)
    return file


def preload(config: Config, specs: Sequence[WorkerSpec]) -> Preloader | None:
    """Return a process that has imported the modules of all roles that use torch."""
    if {config.engine.device, config.encoder.device} != {"cpu"}:
        return None  # A process that has initialised CUDA cannot be forked.
    modules = sorted({role_of(spec.role).module for spec in specs if role_of(spec.role).uses_torch})
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return fork_preloader(modules, _run_forked) if modules else None


def _run_forked() -> None:
    """Run the command line of a worker that has been forked."""
    forked = App(name="pagemill")
    forked.command(worker)
    run_app(forked)


def worker(
    role: Annotated[str, Parameter(validator=check_role)],
    /,
    *,
    model: str | None = None,
    stage: str | None = None,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Run one worker until SIGTERM, Ctrl-C or the end of its terminal drains it.

    The exit code is 78 for a configuration that will never work.

    Parameters
    ----------
    role
        The kind of worker: coordinator, renderer, encoder, prefill, engine, generator, agent,
        autoscaler or gateway.
    model
        The model that an engine, an encoder or a generator serves; needed only when several are
        configured.
    stage
        The stage of the model's pipeline that the worker serves; by default the one named like its
        role, or else the only one of this role.
    """
    try:
        # transformers imports the hub's library.
        check_endpoint()
        file = settings.find_config_file(config)
        loaded = settings.load_config(file)
        login = settings.login_of(loaded, role, nats)
    except ConfigError as error:
        print_refusal(error)
        return runtime.EXIT_CONFIG
    if model is None and len(loaded.models) == 1:
        model = next(iter(loaded.models))
    # Idle threads of torch would otherwise spin, and take the processors from the engine's own
    # kernels and from other workers. torch reads the variable at its import.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return uvloop.run(
        runtime.run(
            role, load_main(role), loaded, login, model, stage, partial(settings.load_config, file)
        )
    )


def load_main(role: str) -> runtime.Main:
    """Import the module of a role, in the process that is to run it, and return its `main`."""
    spec = role_of(role)
    if not spec.uses_torch and not spec.may_load_torch:
        # A renderer needs the tokenizers and image processors of transformers.
        hide_torch()
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
        # The threads of a renderer are as many as it may compute with. numpy's library would divide
        # each of their products, and its idle threads spin, and take the processors from images
        # while a video is resized. It reads the variable when numpy is imported.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # An import of transformers makes millions of objects that stay: collections in the middle of it
    # free nothing and take a seventh of its time.
    gc.disable()
    try:
        main: runtime.Main = importlib.import_module(spec.module).main
    finally:
        gc.enable()
    return main
