"""Batches of the command line: begin them, and show their progress."""

import asyncio
import hashlib
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from shared.batches.input_file import InputCheck, InputLimits
from shared.batches.orders import check_endpoint, parse_window
from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.config.schema import Config
from shared.errors import InvalidRequest, NotFound
from shared.protocol.batch_log import BatchBegun, Results
from shared.state import batch_files, batch_log
from shared.state.media_store import MediaUpload
from workers.cli.terminal import errors, print_note

READ_BYTES = 2**20
LOOK_S = 0.5
MAX_SHOWN_ERRORS = 10


def check_file(file: Path, endpoint: str, config: Config) -> str:
    """Check an input file, and return the SHA-256 of its bytes.

    Raises InvalidRequest for a file with errors, which are printed.
    """
    check_endpoint(endpoint)
    limits = config.batch
    if file.stat().st_size > limits.max_file_mib * 2**20:
        raise InvalidRequest(f"{file} has more than {limits.max_file_mib} MiB (batch.max_file_mib)")
    check = InputCheck(
        InputLimits(endpoint, config.models, limits.max_lines, limits.max_line_mib * 2**20)
    )
    digest = hashlib.sha256()
    with file.open("rb") as content:
        data = content.read(READ_BYTES)
        while not check.is_over:
            following = content.read(READ_BYTES)
            digest.update(data)
            check.feed(data, is_last=not following)
            if not following:
                break
            data = following
    for error in check.errors[:MAX_SHOWN_ERRORS]:
        print_note(f"{file}:{error.line or 1}: {error.message}")
    if check.errors:
        raise InvalidRequest(f"{file} cannot be a batch; errors in its lines: {len(check.errors)}")
    return digest.hexdigest()


async def begin(
    bus: Bus, batch_id: str, file: Path, endpoint: str, window: str, tenant: str, config: Config
) -> BatchState:
    """Upload a checked file, and begin a batch."""
    now_s, limits = int(bus.now_ms() / 1000), config.batch
    deadline_s = now_s + parse_window(window, limits.max_window_h)
    expires_s = now_s + int(limits.ttl_s)
    upload = MediaUpload(bus, tenant)
    try:
        with file.open("rb") as content:
            await _send(content, upload)
        name, head = await upload.seal(file.name, "batch")
        await batch_files.adopt(bus, name, head, expires_s, tenant)
    except BaseException:
        await upload.abort()
        raise
    order = BatchBegun(batch_id, tenant, endpoint, name, now_s, window, deadline_s, expires_s)
    await batch_log.begin(bus, order)
    return BatchState(order)


async def _send(content: BinaryIO, upload: MediaUpload) -> None:
    while data := await asyncio.to_thread(content.read, READ_BYTES):
        await upload.write(data)


async def find(bus: Bus, batch_id: str, tenant: str) -> BatchState:
    """Return the state of a batch. Raises NotFound."""
    log = await batch_log.open_batch(bus, tenant, batch_id)
    if log is None:
        raise NotFound(f"there is no batch {batch_id!r}, or it has expired")
    return log.state


async def show_progress(bus: Bus, state: BatchState) -> BatchState:
    """Show the progress of a batch until it has ended, and return its last state."""
    begun = state.begun
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeRemainingColumn(),
    )
    began_ms, began_lines = bus.now_ms(), _num_finished(state)
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(state.status, total=None, rate="")
        while state.ended is None:
            await asyncio.sleep(LOOK_S)
            state = await find(bus, begun.batch_id, begun.tenant)
            now = state.checkpoint
            seconds = (bus.now_ms() - began_ms) / 1000
            rate = (_num_finished(state) - began_lines) / seconds if seconds > 1 else 0.0
            progress.update(
                task,
                description=state.status,
                total=now.num_lines or None,
                completed=_num_finished(state),
                rate=f"{rate:.1f} lines/s, {now.num_refused} errors",
            )
    return state


def _num_finished(state: BatchState) -> int:
    return state.checkpoint.num_answered + state.checkpoint.num_refused


async def read_results(bus: Bus, state: BatchState, *, follow: bool) -> AsyncIterator[Results]:
    """Yield the results of a batch, and with `follow` also further ones up to its end."""
    first = 1
    while True:
        # The state is read first, so that no result after the last page is missed.
        state = await find(bus, state.begun.batch_id, state.begun.tenant)
        records, more = await batch_log.read_results(bus, state.begun, first)
        for _, record in records:
            yield record
        first = more or (records[-1][0] + 1 if records else first)
        if not more and (state.ended is not None or not follow):
            return
        if not more:
            await asyncio.sleep(LOOK_S)
