"""The command `pagemill up`: all roles on this machine."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

import uvloop
from cyclopts import Parameter
from cyclopts.validators import Number

from shared.config.schema import Config
from shared.errors import ConfigError
from shared.stage import runtime
from workers import settings
from workers.actuator import follow_plan
from workers.cli.commands.models import pull_model
from workers.cli.commands.worker import preload
from workers.cli.models.generated import Wishes, find_models, write_config
from workers.cli.models.local import check_endpoint, find_local, is_folder, missing_files
from workers.cli.options import ConfigFile, NatsUrl
from workers.cli.ports import check_ports
from workers.cli.terminal import errors, noted, print_refusal, print_wrapped
from workers.cli.up import run_until_stopped
from workers.pools import pools_of, workers_of
from workers.roles import GATEWAY, WorkerSpec
from workers.supervisor.cluster import LocalCluster, start_on_first_use
from workers.supervisor.gpus import plan_gpus, read_needed_gpus
from workers.supervisor.pool import SupervisedPools

GATEWAY_PORT = "PAGEMILL_GATEWAY__PORT"
DType = Literal["float64", "float32", "bfloat16", "float16"]
DTYPE_HELP = (
    "Number type of the weights of MODELS; by default one that keeps all values, or bfloat16 if"
    " that does not fit into the memory."
)
QUANTIZATION_HELP = (
    "int8: round the weights of decoders to 8 bits. They take less memory, and answers differ."
)


def up(
    *models: str,
    config: ConfigFile = None,
    nats: NatsUrl = None,
    pull: bool = False,
    dtype: Annotated[DType | None, Parameter(help=DTYPE_HELP)] = None,
    max_model_len: Annotated[int | None, Parameter(validator=Number(gt=0))] = None,
    port: Annotated[int | None, Parameter(validator=Number(gte=0, lte=65535))] = None,
    quantization: Annotated[Literal["int8"] | None, Parameter(help=QUANTIZATION_HELP)] = None,
) -> int:
    """Run all roles on this machine, with an embedded nats-server unless one is configured.

    Ctrl-C drains: workers finish or requeue the requests in flight before they end. A second Ctrl-C
    makes them requeue at once. The workers' log is appended to a file, see `pagemill logs`. The
    exit code is 78 for a configuration that cannot work.

    Parameters
    ----------
    models
        Models to serve without a configuration file: names in the hub's cache, or folders. The
        sizes of the KV cache and of the context are chosen to fit the available memory.
    pull
        Download the MODELS that are not in the hub's cache.
    max_model_len
        Limit on prompt and answer together, in tokens, for MODELS.
    port
        Port of the gateway, in place of gateway.port.
    """
    if port is not None:
        os.environ[GATEWAY_PORT] = str(port)  # Workers read it, too.
    try:
        check_endpoint()
        wishes = Wishes(dtype, max_model_len, quantization)
        if models:
            config = generate(models, config, wishes, pull)
        elif pull or wishes != Wishes():
            raise ConfigError(
                "--pull, --dtype, --max-model-len and --quantization belong to models that are"
                " named on the command line",
                field="models",
            )
        file = settings.find_config_file(config)
        loaded = settings.load_config(file)
        with cluster_with_gateway(loaded, file, nats) as cluster:
            return uvloop.run(run_until_stopped(cluster, loaded))
    except ConfigError as error:
        print_refusal(error)
        return runtime.EXIT_CONFIG


@contextlib.contextmanager
def cluster_with_gateway(
    config: Config, file: Path | None, nats: str | None = None
) -> Iterator[LocalCluster]:
    """Yield a cluster of all roles. Other commands in this folder find its configuration.

    Raises ConfigError, and Unavailable for a port in use.
    """
    check_ports(config, nats)
    cluster = local_cluster(config, file, nats, WorkerSpec(GATEWAY))
    with contextlib.ExitStack() as until_stopped:

        def note() -> None:
            is_embedded = nats is None and config.nats.url is None
            settings.set_running(file, urlsplit(cluster.url).port if is_embedded else None)
            until_stopped.callback(settings.set_running, None, None)

        cluster.when_connectable = note
        cluster.when_ready = partial(start_on_first_use, supervisor=cluster.supervisor)
        yield cluster


def local_cluster(
    config: Config, file: Path | None, nats: str | None, server: WorkerSpec
) -> LocalCluster:
    """Return a cluster of the workers of all stages, and of `server`, on this machine.

    `file` is the file of the configuration. This must be called without a running event loop.
    Raises ConfigError.
    """
    settings.check_paths(config)
    pools = pools_of(config)
    workers = [*workers_of(config, pools), server]
    # The workers of a pool at zero are forked from the same process later.
    specs = [*workers, *(pool.spec for pool in pools.by_name.values())]
    gpus = read_needed_gpus(config, specs)
    for title, place in plan_gpus(config, workers, gpus):
        print_wrapped(errors, f"{title}: {place}")
    log_file = settings.find_log_file(config)
    cluster = LocalCluster(
        config, file, workers, nats, log_file, preloader=preload(config, specs), gpus=gpus
    )
    if pools.by_name:
        local = SupervisedPools(cluster.supervisor, pools.by_name.values())
        cluster.follow = lambda bus: follow_plan(bus, local)
    return cluster


def generate(models: Sequence[str], config: Path | None, wishes: Wishes, may_pull: bool) -> Path:
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
    local = find_models(models)
    with noted(f"checking whether {', '.join(model.name for model in local)} can be served …"):
        file, lines = write_config(local, wishes)
    for line in lines:
        print_wrapped(errors, line)
    return file
