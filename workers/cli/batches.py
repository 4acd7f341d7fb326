"""Batches of the command line: begin them, and show their progress."""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import BinaryIO

from shared.batches.input_file import InputCheck, InputLimits, read_line
from shared.batches.open_lines import BLOCK_BYTES
from shared.batches.orders import check_endpoint, parse_window
from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.bus.store_room import StoreRoom
from shared.config.schema import BatchConfig, Config
from shared.errors import (
    DiskFull,
    InvalidMedia,
    InvalidRequest,
    NotFound,
    Overloaded,
    QuotaExceeded,
    Unavailable,
)
from shared.protocol import subjects
from shared.protocol.batch_log import Results
from shared.protocol.batch_orders import BatchOrder
from shared.protocol.encoding import UNDECODABLE
from shared.protocol.names import is_name, split_id
from shared.state import batch_files, batch_intake, batch_log, batch_room
from shared.state.media_store import MediaUpload, StoredFile
from shared.tenants.storage_quotas import StorageQuotas
from workers.cli.batch_display import BatchDisplay
from workers.cli.outputs import NewFile, writing
from workers.cli.terminal import print_note

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


def models_in(file: Path) -> set[str]:
    """Return the models that the lines of a file name. Lines with errors are skipped."""
    models: set[str] = set()
    with file.open("rb") as content:
        for line in content:
            with contextlib.suppress(*UNDECODABLE):
                models.add(read_line(line).model)
    return models


async def begin(
    bus: Bus, batch_id: str, file: Path, endpoint: str, window: str, tenant: str, config: Config
) -> BatchState:
    """Upload a checked file, and begin a batch. Raises like `batch_intake.accept`."""
    limits = config.batch
    parse_window(window, limits.max_window_h)  # A wrong window is refused before the upload.
    stored = await upload(bus, file, tenant, limits)
    order = BatchOrder(endpoint, stored.name, completion_window=window)
    begun = await batch_intake.accept(bus, limits, tenant, batch_id, order)
    await batch_log.begin(bus, begun)
    return BatchState(begun)


async def upload(bus: Bus, file: Path, tenant: str, limits: BatchConfig) -> StoredFile:
    """Store a file for batches: one with requests, or one that requests name.

    Raises InvalidMedia for a file that cannot be read, Overloaded and Unavailable.
    """
    media = MediaUpload(bus, tenant)
    try:
        with file.open("rb") as content:
            await _send(content, media)
        name, head = await media.seal(file.name, "batch")
        expires_s = int(bus.now_ms() / 1000 + limits.ttl_s)
        return await batch_files.adopt(bus, name, head, expires_s, tenant)
    except OSError as error:
        await media.abort()
        raise InvalidMedia(f"{file}: {error.strerror}", field="files") from error
    except BaseException:
        await media.abort()
        raise


def uploads(bus: Bus, tenant: str, limits: BatchConfig) -> Callable[[Path], Awaitable[str]]:
    """Return a function that stores each file once, and returns the SHA-256 of its bytes."""
    names: dict[Path, str] = {}

    async def send(file: Path) -> str:
        if file not in names:
            names[file] = (await upload(bus, file, tenant, limits)).name
        return names[file]

    return send


async def _send(content: BinaryIO, upload: MediaUpload) -> None:
    while data := await asyncio.to_thread(content.read, READ_BYTES):
        await upload.write(data)


async def find_pause(bus: Bus, state: BatchState) -> str | None:
    """Return why a batch in progress has no room for its results; None if it has. Raises
    Unavailable."""
    if state.status != "in_progress":
        return None
    try:
        await StoreRoom(bus).check()
        await StorageQuotas(bus).check(state.begun.tenant, [subjects.BATCHES_STREAM])
        await batch_room.check(bus, BLOCK_BYTES)
    except (DiskFull, Overloaded, QuotaExceeded) as error:
        return f"{error.code}: {error.message}"
    return None


def print_errors(state: BatchState) -> None:
    """Print why a batch has failed."""
    for error in [] if state.ended is None else state.ended.errors[:MAX_SHOWN_ERRORS]:
        line = "" if error.line is None else f"line {error.line}: "
        print_note(f"{line}{error.code}: {error.message}")


async def find(bus: Bus, batch_id: str, tenant: str) -> BatchState:
    """Return the state of a batch. Raises NotFound."""
    log = await batch_log.open_batch(bus, tenant, batch_id)
    if log is None:
        raise NotFound(f"there is no batch {batch_id!r}, or it has expired")
    return log.state


async def find_any_tenant(bus: Bus, address: str, tenant: str) -> BatchState:
    """Return the state of the batch ID or ID@TENANT, which without a tenant is of any tenant.

    Raises NotFound, and InvalidRequest for an id that several tenants use.
    """
    batch_id, named = split_id(address)
    tenant = tenant or named
    if not tenant and is_name(batch_id) and await batch_log.open_batch(bus, "", batch_id) is None:
        tenant = await batch_log.tenant_of(bus, batch_id) or ""
    return await find(bus, batch_id, tenant)


async def follow(
    bus: Bus, state: BatchState, *, to_end: bool = True
) -> AsyncIterator[tuple[BatchState, list[Results]]]:
    """Yield the state of a batch together with its next results, until it has ended.

    After a loss of the connection it continues with the next result. Without `to_end`, it yields
    the results so far. Raises NotFound, and without `to_end` also Unavailable.
    """
    begun, first, is_connected = state.begun, 1, True
    while True:
        try:
            # The state is read first, so that no result after the last page is missed.
            state = await find(bus, begun.batch_id, begun.tenant)
            records, more = await batch_log.read_results(bus, begun, first)
        except Unavailable as error:
            if not to_end:
                raise
            if is_connected:
                print_note(f"waiting for the broker: {error.message}")
            is_connected = False
            await asyncio.sleep(LOOK_S)
            continue
        is_connected = True
        first = more or (records[-1][0] + 1 if records else first)
        yield state, [record for _, record in records]
        if not more and (state.ended is not None or not to_end):
            return
        if not more:
            await asyncio.sleep(LOOK_S)


async def collect(
    bus: Bus, state: BatchState, display: BatchDisplay, output: Path, error_file: Path
) -> BatchState:
    """Write the results of a batch as they arrive, and return its last state.

    The files get their names when the batch has ended. The error file exists only with errors.
    """
    with NewFile(output) as answers, NewFile(error_file) as refusals:
        async for latest, records in follow(bus, state):
            state = latest
            with writing(output):
                for record in records:
                    answers.stream.writelines(bytes(line) + b"\n" for line in record.output)
                    refusals.stream.writelines(bytes(line) + b"\n" for line in record.errors)
            display.update(state)
        answers.keep()
        if state.checkpoint.num_refused:
            refusals.keep()
    return state
