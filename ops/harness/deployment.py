"""A running Pagemill on this machine, as `pagemill up` runs it: broker, workers and gateway."""

import asyncio
import contextlib
import os
import signal
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import Config
from workers import settings
from workers.cli.commands.worker import preload
from workers.roles import AGENT, BATCHER, WorkerSpec, default_workers
from workers.supervisor.cluster import LocalCluster
from workers.supervisor.preloader import Preloader

ROOT = Path(__file__).parents[2]
DEMO_VOICE = settings.OPS / "demo_voice"


class Deployment:
    """Broker and workers that run, and the gateway, if there is one.

    A worker that ends is replaced, as by `pagemill up`.
    """

    def __init__(
        self, cluster: LocalCluster, config: Config, workers: Sequence[WorkerSpec], folder: Path
    ) -> None:
        self._cluster = cluster
        self._workers = workers
        self.config = config
        self.url = cluster.url
        """URL of the broker."""
        self.folder = folder
        self.log = folder / "workers.log"

    @property
    def http(self) -> str:
        """URL of the gateway."""
        assert self._cluster.gateway_url is not None, "there is no gateway"
        return self._cluster.gateway_url

    @contextlib.asynccontextmanager
    async def bus(self, name: str = "bench") -> AsyncIterator[Bus]:
        """Connect a client to the broker."""
        bus = await Bus.connect(self.url, name)
        try:
            yield bus
        finally:
            await bus.close()

    def pids(self, role: str, stage: str | None = None) -> list[int]:
        """Return the process ids of the running workers of a role, or of one of its stages."""
        workers = {w for w in self._workers if w.role == role and stage in (None, w.stage)}
        return [pid for worker in workers for pid in self._pids_of(worker)]

    def kill(self, role: str, stage: str | None = None) -> None:
        """Kill all workers of a role, or of one of its stages."""
        for pid in self.pids(role, stage):
            os.kill(pid, signal.SIGKILL)

    @property
    def broker_pid(self) -> int:
        """Process id of the broker."""
        return int((self.folder / "nats" / "nats-server.pid").read_text())

    def processes(self) -> dict[str, int]:
        """Return a process id for each stage or other role, and for the broker."""
        pids = {"broker": self.broker_pid}
        for worker in self._workers:
            pids[worker.stage or worker.role] = self._pids_of(worker)[0]
        return pids

    def _pids_of(self, worker: WorkerSpec) -> list[int]:
        return [slot.pid for slot in self._cluster.supervisor.slots(worker) if slot.pid]


@contextlib.asynccontextmanager
async def deployment(
    tree: Mapping[str, Any],
    *,
    workers: Sequence[WorkerSpec] | None = None,
    gateway: bool = True,
    preloader: Preloader | None = None,
    folder: Path | None = None,
) -> AsyncIterator[Deployment]:
    """Run a deployment of a configuration, and drain and stop it at the end.

    `tree` is the content of `pagemill.yaml`; ports that it omits are free ones, and the broker's
    store is in `folder`, by default a temporary one. Without `workers`, the workers of
    `pagemill up` run, with a gateway unless `gateway` is false, and with an agent or a batcher if
    the configuration has its section. Workers are forked from the `preloader`, if there is one.
    """
    with contextlib.ExitStack() as stack:
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-")))
        file = write_config(tree, folder)
        config = settings.load_config(file)
        if workers is None:
            workers = default_workers(config)
            workers += [WorkerSpec(AGENT)] if AGENT in tree else []
            workers += [WorkerSpec(BATCHER)] if "batch" in tree else []
            workers += [WorkerSpec("gateway")] if gateway else []
        log = folder / "workers.log"
        cluster = LocalCluster(config, file, workers, log_file=log, preloader=preloader)
        try:
            await cluster.start()
            yield Deployment(cluster, config, workers, folder)
        finally:
            await cluster.stop()


def write_config(tree: Mapping[str, Any], folder: Path) -> Path:
    """Write `pagemill.yaml` for a deployment with the broker's store in a folder."""
    nats = {"port": 0, "store_dir": str(folder / "nats")} | tree.get("nats", {})
    gateway = {"port": 0} | tree.get("gateway", {})
    file = folder / "pagemill.yaml"
    file.write_bytes(msgspec.json.encode({**tree, "nats": nats, "gateway": gateway}))
    return file


def demo_tree(*, spoken: bool = False, **model: Any) -> dict[str, Any]:
    """Return a configuration of the demo model, with the demo voice if it is `spoken`.

    Answers are greedy and the context has 1,024 tokens, unless `model` has other settings.
    """
    served = {
        "path": str(settings.DEMO_MODEL),
        "max_model_len": 1024,
        "sampling_defaults": {"temperature": 0.0, "max_tokens": 64},
        **model,
    }
    if spoken:
        stages = msgspec.yaml.decode((DEMO_VOICE / "pagemill.yaml").read_bytes())
        stages = stages["models"]["demo"]["stages"]
        served["stages"] = {
            name: stage | {"path": str(DEMO_VOICE / stage["path"])}
            for name, stage in stages.items()
        }
    return {"models": {"demo": served}}


def preload_for(tree: Mapping[str, Any], folder: Path) -> Preloader | None:
    """Fork a process with the modules of a configuration's workers, which are then forked from it.

    It must be called before there is a thread or an event loop. None on a machine with a GPU.
    """
    config = settings.load_config(write_config(tree, folder))
    return preload(config, default_workers(config))


@contextlib.asynccontextmanager
async def broker(folder: Path) -> AsyncIterator[EmbeddedServer]:
    """Run a broker that accepts all clients, with its store in a folder."""
    server = EmbeddedServer(folder / "nats")
    await asyncio.to_thread(server.start)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.stop)
