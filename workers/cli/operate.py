"""Implementation of the operator's commands: `pagemill where`, `cancel` and `dead`."""

import contextlib
import os
import shlex
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path

import msgspec
from rich.markup import escape
from rich.table import Table

from shared.client import cancel
from shared.errors import InvalidRequest, NotFound
from shared.protocol.encoding import is_packed, to_json
from shared.protocol.messages import DeadLetter
from shared.protocol.requests import decode_request
from shared.state import dead_letters, request_status
from shared.state.request_status import RequestStatus
from workers.cli.terminal import connected, out, print_json, print_line


async def print_where(request_id: str, url: str, *, as_json: bool) -> int:
    """Print the status of a request. Return 0, or 1 for an unknown request."""
    async with connected(url, "where") as bus:
        found = await request_status.find(bus, request_id)
    print_json(found) if as_json else _print_status(found)
    return 0 if found.state != "unknown" else 1


def _print_status(found: RequestStatus) -> None:
    rows = {
        "state": found.state.replace("_", " "),
        "stage": found.stage,
        "worker": found.worker,
        "attempt": found.attempt,
        "waiting": None if found.waits_s is None else f"{found.waits_s:.1f} s in this stage",
        "records": found.records,
        "why": found.why,
    }
    _print_rows(rows)
    for attempt in found.attempts:
        print_line(
            f"         {_format_time(attempt.began_ms)} {attempt.worker} delivery {attempt.number}"
            f" {attempt.outcome.replace('_', ' ')}"
        )


async def cancel_request(request_id: str, url: str) -> int:
    async with connected(url, "cancel") as bus:
        await cancel(bus, request_id)
    return 0


async def print_dead(limit: int, url: str) -> int:
    table = Table("failed", "request", "role", "attempts", "code", "message", box=None)
    async with connected(url, "dead") as bus:
        async for letter in dead_letters.read_newest(bus, limit):
            table.add_row(
                _format_time(letter.failed_ms),
                letter.request_id or "(none)",
                letter.role,
                str(letter.attempts),
                letter.error.code,
                escape(letter.error.message),
            )
    out.print(table if table.row_count else "no dead letters")
    return 0


async def print_letter(request_id: str, url: str, *, as_json: bool) -> int:
    async with connected(url, "dead") as bus:
        letter = await dead_letters.find(bus, request_id)
    print_json(letter) if as_json else _print_letter(letter)
    return 0


def _print_letter(letter: DeadLetter) -> None:
    rows = {
        "request": letter.request_id,
        "failed": _format_time(letter.failed_ms),
        "stage": f"{letter.role} {letter.worker}, version {letter.version}",
        "subject": letter.subject,
        "attempts": letter.attempts,
        "cause": f"{letter.error.code}: {letter.error.message}",
        "input": f"{letter.input_len} bytes",
    }
    _print_rows(rows)
    for attempt in letter.history:
        print_line(f"         {_format_time(attempt.began_ms)} {attempt.worker} {attempt.outcome}")
    print_line(letter.traceback)
    if letter.request:
        out.print(letter.request.decode(errors="replace"), markup=False, soft_wrap=True)


async def requeue(request_id: str, url: str, *, edit: bool) -> int:
    """Publish the request of a dead letter again.

    Raises NotFound without a letter, InvalidRequest for a request that cannot be decoded.
    """
    async with connected(url, "dead") as bus:
        letter = await dead_letters.find(bus, request_id)
        if not letter.request:
            raise NotFound(f"the dead letter of {request_id} does not hold the request")
        try:
            request = decode_request(_edit(letter.request) if edit else letter.request)
        except msgspec.MsgspecError as error:
            message = f"the edited request is not valid: {error}"
            raise InvalidRequest(
                message if edit else f"{error}: use --edit to correct it"
            ) from error
        request = msgspec.structs.replace(request, request_id=request_id)
        await dead_letters.requeue(bus, request_id, request.model, to_json(request), letter.tenant)
    out.print(f"published again: pagemill follow {request_id}", highlight=False)
    return 0


def _edit(data: bytes) -> bytes:
    """Open a request in the editor and return the text that the user has saved."""
    if is_packed(data):
        data = msgspec.json.encode(msgspec.msgpack.decode(data))
    with contextlib.suppress(msgspec.MsgspecError):  # Other bytes are edited as they are.
        data = msgspec.json.format(data, indent=2)
    editor = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    with tempfile.TemporaryDirectory(prefix="pagemill-") as folder:
        file = Path(folder) / "request.json"
        file.write_bytes(data)
        subprocess.run([*editor, str(file)], check=True)
        return file.read_bytes()


def _print_rows(rows: Mapping[str, object]) -> None:
    for name, value in rows.items():
        if value is not None:
            print_line(f"{name:<8} {value}")


def _format_time(ms: float) -> str:
    return datetime.fromtimestamp(ms / 1000, UTC).strftime("%Y-%m-%d %H:%M:%S")
