"""Implementation of `pagemill batch run`: begins the batch of a file or finds it, and writes its
results."""

import asyncio
import contextlib
import hashlib
import secrets
from dataclasses import dataclass
from pathlib import Path

import uvloop

from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.bus.embedded_server import is_listening
from shared.bus.login import Login
from shared.config.schema import Config
from shared.errors import InvalidRequest, NotFound
from shared.state import batch_log
from workers.cli import batches
from workers.cli.batch_display import BatchDisplay, errors_by_code
from workers.cli.broker import connected
from workers.cli.outputs import check_output
from workers.cli.terminal import EXIT_INTERRUPTED, cancelled_by_signals, print_note
from workers.cli.up import run_until_stopped
from workers.settings import login_of
from workers.supervisor.cluster import LocalCluster

EXIT_UNSUCCESSFUL = 2


@dataclass(frozen=True, slots=True)
class Order:
    """A checked file of requests, and how it is to be run."""

    file: Path
    sha256: str
    endpoint: str
    window: str
    tenant: str
    again: bool = False

    def batch_id(self, number: int) -> str:
        """Return the id of a run of the file, so that the same command finds its batch."""
        name = f"{self.sha256}:{self.endpoint}:{self.tenant}:{number}".encode()
        return f"batch_{hashlib.blake2b(name, digest_size=16).hexdigest()}"


@dataclass(frozen=True, slots=True)
class ResultFiles:
    output: Path
    errors: Path

    def check(self) -> None:
        """Raise InvalidRequest if the files cannot be written, before a batch begins."""
        for file in (self.output, self.errors):
            # The file is replaced when the batch has ended, which would remove a device or pipe.
            if file.exists() and not file.is_file():
                raise InvalidRequest(f"{file}: it is not a file", field="output")
            check_output(file)


def is_running(config: Config, nats: str | None) -> bool:
    """Return whether the broker of `pagemill up` runs on this machine."""
    is_embedded = nats is None and config.nats.url is None
    return is_embedded and config.nats.port != 0 and is_listening(config.nats.port)


def run_in_cluster(order: Order, files: ResultFiles, config: Config, cluster: LocalCluster) -> int:
    """Start Pagemill on this machine, run a file, stop Pagemill, and return the exit code.

    Raises PagemillError.
    """

    async def work() -> int:
        return await run(order, files, config, login_of(config, given_url=cluster.url))

    return uvloop.run(run_until_stopped(cluster, config, work))


async def run_until_interrupted(
    order: Order, files: ResultFiles, config: Config, login: Login
) -> int:
    """Run a file at a running Pagemill, and return the exit code. Raises PagemillError."""
    with cancelled_by_signals():
        return await run(order, files, config, login)


async def run(order: Order, files: ResultFiles, config: Config, login: Login) -> int:
    """Begin the batch of a file, or find it, and write its results as they arrive.

    Return the exit code, also when this is cancelled; the batch then continues. Raises
    PagemillError.
    """
    batch_id = ""
    try:
        async with connected(login, "batch") as bus:
            state = await _find_or_begin(bus, order, config)
            batch_id = state.begun.batch_id
            print_note(f"batch {batch_id}")
            with BatchDisplay() as display:
                state = await batches.collect(bus, state, display, files.output, files.errors)
    except asyncio.CancelledError:
        if batch_id:
            print_note(
                f"batch {batch_id} has not ended: the same command continues, and"
                f" `pagemill batch cancel {batch_id}` cancels it"
            )
        return EXIT_INTERRUPTED
    now = state.checkpoint
    print_note(f"{state.status}; answers: {now.num_answered}, in {files.output}")
    if now.num_refused:
        print_note(f"{errors_by_code(now.error_counts)}; in {files.errors}")
    batches.print_errors(state)
    return 0 if state.status == "completed" and not now.num_refused else EXIT_UNSUCCESSFUL


async def _find_or_begin(bus: Bus, order: Order, config: Config) -> BatchState:
    state = None if order.again else await _find_earlier(bus, order)
    if state is not None:
        return state
    batch_id = f"batch_{secrets.token_hex(8)}" if order.again else await _free_id(bus, order)
    return await batches.begin(
        bus, batch_id, order.file, order.endpoint, order.window, order.tenant, config
    )


async def _find_earlier(bus: Bus, order: Order) -> BatchState | None:
    """Return the latest batch of the same file, unless it has ended without success."""
    latest: BatchState | None = None
    with contextlib.suppress(NotFound):
        number = 0
        while True:
            latest = await batches.find(bus, order.batch_id(number), order.tenant)
            number += 1
    if latest is None or latest.status in ("failed", "expired", "cancelled"):
        return None
    return None if latest.ended is not None and latest.ended.removed else latest


async def _free_id(bus: Bus, order: Order) -> str:
    number = 0
    while await batch_log.open_batch(bus, order.tenant, order.batch_id(number)) is not None:
        number += 1
    return order.batch_id(number)
