"""Processes of workers: forked from the preloader, or executed."""

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import structlog

from shared.gpu.devices import VISIBLE_DEVICES
from shared.helpers.forking import become_child
from workers.roles import WorkerSpec, role_of
from workers.supervisor.log_file import open_for_append
from workers.supervisor.preloader import Preloader
from workers.supervisor.supervisor import Process

_log = structlog.get_logger()


class WorkerProcesses:
    """Starts `pagemill worker` for each worker; a `Spawn`."""

    def __init__(
        self,
        config_file: Path | None,
        url: str | None = None,
        log_file: Path | None = None,
        preloader: Preloader | None = None,
    ) -> None:
        """Workers read `config_file` themselves; None stands for the default.

        With `url` None, workers read the URL of the broker from the configuration, because
        arguments are visible in `ps` and the URL may contain a password. Without `log_file`,
        workers write their log to the stderr of this process. Without `preloader`, all workers are
        executed.
        """
        self.config_file = config_file
        self.url = url
        self.log_file = log_file
        self.preloader = preloader

    def forks(self, worker: WorkerSpec) -> bool:
        """Return whether this worker is forked from the preloader.

        The process of a worker on a GPU is new, because CUDA reads its environment once.
        """
        is_forkable = worker.device is None and role_of(worker.role).can_be_forked
        return self.preloader is not None and is_forkable

    async def __call__(self, worker: WorkerSpec) -> Process:
        arguments = self._arguments(worker)
        log = (
            open_for_append(self.log_file)
            if self.log_file is not None
            else contextlib.nullcontext(sys.stderr.fileno())
        )
        with log as stderr:
            if self.preloader is not None and self.forks(worker):
                try:
                    return await self.preloader.start(arguments, stderr=stderr)
                except ConnectionError:
                    _log.warning("preloader_ended")
                    self.preloader = None
            # With its own process group, a worker does not receive Ctrl-C, which starts the drain
            # in the supervisor.
            return await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "workers",
                *arguments,
                stderr=stderr,
                env=_environment_of(worker),
                preexec_fn=become_child,
            )

    def close(self) -> None:
        """End the preloader, whose processes should have ended before."""
        if self.preloader is not None:
            self.preloader.close()

    def _arguments(self, worker: WorkerSpec) -> list[str]:
        arguments = ["worker", worker.role]
        if self.url is not None:
            arguments += ["--nats", self.url]
        if worker.model is not None:
            arguments.append(f"--model={worker.model}")  # It may begin with a hyphen.
        if worker.stage is not None:
            arguments += ["--stage", worker.stage]
        if worker.pool is not None:
            arguments.append(f"--pool={worker.pool}")
        if self.config_file is not None:
            arguments += ["--config", str(self.config_file)]
        return arguments


def _environment_of(worker: WorkerSpec) -> dict[str, str]:
    """Return the environment of a process. A worker on a GPU sees no other GPU."""
    if worker.device is None:
        return dict(os.environ)
    return {**os.environ, VISIBLE_DEVICES: worker.device}
