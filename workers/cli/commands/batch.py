"""Commands about batches: `pagemill batch run`, `create`, `list`, `show`, `follow`, `results` and
`cancel`."""

import contextlib
import hashlib
import secrets
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import App, Parameter
from rich.table import Table

from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.errors import NotFound
from shared.state import batch_log
from workers import settings
from workers.cli import batches
from workers.cli.audited import audited
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, NatsUrl, find_login, load
from workers.cli.terminal import format_time, out, print_json, print_line, print_note, print_rows

batch = App(name="batch", help="Run files of requests as durable jobs.")

Endpoint = Annotated[str, Parameter(help="Endpoint that the lines call.")]
Window = Annotated[str, Parameter(help="Time in which the batch must end, such as 90m, 24h or 7d.")]
Tenant = Annotated[str, Parameter(help="Tenant of the batch; by default none.")]
BatchId = Annotated[str, Parameter(help="Id of the batch.")]
CHAT = "/v1/chat/completions"
EXIT_UNSUCCESSFUL = 2


@batch.command
async def run(
    file: Path,
    /,
    *,
    output: Annotated[Path, Parameter(name=["--output", "-o"])],
    errors: Path | None = None,
    endpoint: Endpoint = CHAT,
    window: Window = "24h",
    tenant: Tenant = "",
    again: bool = False,
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Run the requests of a file, and write their answers. Ctrl-C leaves the batch running, and the
    same command continues to wait for it.

    Parameters
    ----------
    file
        JSON lines in the format of OpenAI's batches.
    output
        File for the answers.
    errors
        File for the lines with errors; by default the output with `.errors` before its suffix.
    again
        Run the file again, even if it has been run before.
    """
    loaded = load(config)
    sha256 = batches.check_file(file, endpoint, loaded)
    async with connected(settings.login_of(loaded, given_url=nats), "batch") as bus:
        state = None if again else await _find_earlier(bus, sha256, endpoint, tenant)
        if state is None:
            batch_id = f"batch_{secrets.token_hex(16)}" if again else ""
            batch_id = batch_id or await _free_id(bus, sha256, endpoint, tenant)
            state = await batches.begin(bus, batch_id, file, endpoint, window, tenant, loaded)
        print_note(f"batch {state.begun.batch_id}")
        state = await batches.show_progress(bus, state)
        error_file = errors or output.with_suffix(f".errors{output.suffix}")
        await _write(bus, state, output, error_file)
    now = state.checkpoint
    print_note(f"{state.status}; answers: {now.num_answered}, in {output}")
    if now.num_refused:
        print_note(f"errors: {now.num_refused}, in {error_file}")
    _print_errors(state)
    return 0 if state.status == "completed" and not now.num_refused else EXIT_UNSUCCESSFUL


def _id_of(sha256: str, endpoint: str, tenant: str, number: int) -> str:
    """Return the id of a run of a file, so that the same command finds its batch."""
    name = f"{sha256}:{endpoint}:{tenant}:{number}".encode()
    return f"batch_{hashlib.blake2b(name, digest_size=16).hexdigest()}"


async def _find_earlier(bus: Bus, sha256: str, endpoint: str, tenant: str) -> BatchState | None:
    """Return the latest batch of the same file, unless it has ended without success."""
    found: BatchState | None = None
    with contextlib.suppress(NotFound):
        number = 0
        while True:
            found = await batches.find(bus, _id_of(sha256, endpoint, tenant, number), tenant)
            number += 1
    if found is None or found.status in ("failed", "expired", "cancelled"):
        return None
    return None if found.ended is not None and found.ended.removed else found


async def _free_id(bus: Bus, sha256: str, endpoint: str, tenant: str) -> str:
    number = 0
    while True:
        batch_id = _id_of(sha256, endpoint, tenant, number)
        if await batch_log.open_batch(bus, tenant, batch_id) is None:
            return batch_id
        number += 1


async def _write(bus: Bus, state: BatchState, output: Path, error_file: Path) -> None:
    """Write the results of a batch that has ended into new files, which then get their names."""
    parts = [file.with_name(f"{file.name}.part") for file in (output, error_file)]
    with parts[0].open("wb") as answers, parts[1].open("wb") as refusals:
        async for record in batches.read_results(bus, state, follow=False):
            answers.writelines(bytes(line) + b"\n" for line in record.output)
            refusals.writelines(bytes(line) + b"\n" for line in record.errors)
    parts[0].replace(output)
    if state.checkpoint.num_refused:
        parts[1].replace(error_file)
    else:
        parts[1].unlink()


def _print_errors(state: BatchState) -> None:
    for error in [] if state.ended is None else state.ended.errors[: batches.MAX_SHOWN_ERRORS]:
        line = "" if error.line is None else f"line {error.line}: "
        print_note(f"{line}{error.code}: {error.message}")


@batch.command
async def create(
    file: Path,
    /,
    *,
    endpoint: Endpoint = CHAT,
    window: Window = "24h",
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Begin a batch, and print its id.

    Parameters
    ----------
    file
        JSON lines in the format of OpenAI's batches.
    """
    loaded = load(config)
    batches.check_file(file, endpoint, loaded)
    async with connected(settings.login_of(loaded, given_url=nats), "batch") as bus:
        batch_id = f"batch_{secrets.token_hex(16)}"
        await batches.begin(bus, batch_id, file, endpoint, window, tenant, loaded)
    print_line(batch_id)
    return 0


@batch.command(name="list")
async def list_batches(
    *, limit: int = 50, tenant: Tenant = "", config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """List the batches of a tenant, the newest first.

    Parameters
    ----------
    limit
        Maximum number of batches.
    """
    table = Table("created", "status", "lines", "answers", "errors", box=None)
    table.add_column("batch", no_wrap=True)
    async with connected(find_login(config, nats), "batch") as bus:
        orders = (await batch_log.list_begun(bus, tenant))[:limit]
        for state in await batch_log.open_batches(bus, orders):
            now = state.checkpoint
            table.add_row(
                format_time(1000 * state.begun.created_s),
                state.status,
                str(now.num_lines),
                str(now.num_answered),
                str(now.num_refused),
                state.begun.batch_id,
            )
    out.print(table if table.row_count else "no batches")
    return 0


@batch.command
async def show(
    batch_id: BatchId,
    /,
    *,
    json: bool = False,
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the state of a batch.

    Parameters
    ----------
    json
        Print one JSON object.
    """
    async with connected(find_login(config, nats), "batch") as bus:
        state = await batches.find(bus, batch_id, tenant)
    begun, now = state.begun, state.checkpoint
    rows = {
        "batch": batch_id,
        "status": state.status,
        "endpoint": begun.endpoint,
        "lines": now.num_lines,
        "answers": now.num_answered,
        "errors": now.num_refused,
        "tokens": now.usage.prompt_tokens + now.usage.completion_tokens,
        "created": format_time(1000 * begun.created_s),
        "window": f"{begun.window}, until {format_time(1000 * begun.deadline_s)}",
        "ended": None if state.ended is None else format_time(1000 * state.ended.at_s),
    }
    print_json(rows) if json else print_rows(rows)
    _print_errors(state)
    return 0


@batch.command
async def follow(
    batch_id: BatchId,
    /,
    *,
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the results of a batch as they arrive, until it has ended."""
    return await _print_results(batch_id, tenant, config, nats, which="all", follow=True)


@batch.command
async def results(
    batch_id: BatchId,
    /,
    *,
    which: Literal["all", "answers", "errors"] = "all",
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Print the results of a batch so far, as JSON lines.

    Parameters
    ----------
    which
        Print only answers, or only errors.
    """
    return await _print_results(batch_id, tenant, config, nats, which=which, follow=False)


async def _print_results(
    batch_id: str,
    tenant: str,
    config: Path | None,
    nats: str | None,
    *,
    which: Literal["all", "answers", "errors"],
    follow: bool,
) -> int:
    async with connected(find_login(config, nats), "batch") as bus:
        state = await batches.find(bus, batch_id, tenant)
        async for record in batches.read_results(bus, state, follow=follow):
            answers = record.output if which != "errors" else []
            refusals = record.errors if which != "answers" else []
            for line in (*answers, *refusals):
                print_json(line)
    return 0


@batch.command
async def cancel(
    batch_id: BatchId,
    /,
    *,
    tenant: Tenant = "",
    config: ConfigFile = None,
    nats: NatsUrl = None,
) -> int:
    """Cancel a batch, and wait until it has ended. Its finished lines keep their results."""
    async with connected(find_login(config, nats), "batch") as bus:
        state = await batches.find(bus, batch_id, tenant)
        if state.ended is None:
            async with audited(bus, "cancel", batch_id, tenant):
                await batch_log.cancel(bus, state.begun)
            state = await batches.show_progress(bus, state)
    print_line(state.status)
    return 0 if state.status == "cancelled" else EXIT_UNSUCCESSFUL
