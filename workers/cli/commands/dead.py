"""Commands about dead letters: `pagemill dead list`, `show` and `requeue`."""

import contextlib
import os
import shlex
import subprocess
import tempfile
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter
from rich.markup import escape
from rich.table import Table

from shared.errors import InvalidRequest, NotFound
from shared.protocol.encoding import is_packed
from shared.protocol.messages import DeadLetter
from shared.protocol.requests import decode_request
from shared.state import dead_letters
from workers.cli.audited import audited
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, NatsUrl, find_login
from workers.cli.terminal import format_time, harmless, out, print_json, print_line, print_rows
from workers.roles import AGENT

LetterName = Annotated[
    str,
    Parameter(
        help="Name of the dead letter, as `pagemill dead list` shows it: the id of a request, or"
        " `batch:` or `response:` and an id, with `@` and the tenant if it has one."
    ),
]

dead = App(name="dead", help="Inspect and requeue requests that no attempt could answer.")


@dead.command(name="list")
async def list_letters(*, limit: int = 50, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """List dead letters, the newest first.

    Parameters
    ----------
    limit
        Maximum number of letters.
    """
    table = Table("failed", "name", "role", "attempts", "code", "message", box=None)
    async with connected(find_login(config, nats), "dead") as bus:
        async for name, letter in dead_letters.read_newest(bus, limit):
            table.add_row(
                format_time(letter.failed_ms),
                escape(harmless(name)),
                letter.role,
                str(letter.attempts),
                letter.error.code,
                escape(harmless(letter.error.message)),
            )
    out.print(table if table.row_count else "no dead letters")
    return 0


@dead.command(name="show")
async def show_letter(
    name: LetterName, /, *, json: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print one dead letter: cause, attempts, traceback, and the request itself.

    Parameters
    ----------
    json
        Print one JSON object.
    """
    async with connected(find_login(config, nats), "dead") as bus:
        letter = await dead_letters.find(bus, name)
    print_json(letter) if json else _print_letter(letter)
    return 0


@dead.command(name="requeue")
async def requeue_letter(
    name: LetterName, /, *, edit: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Publish the request of a dead letter again, under the same id, or continue a response.

    Parameters
    ----------
    edit
        Open the request in $EDITOR first.
    """
    async with connected(find_login(config, nats), "dead") as bus:
        letter = await dead_letters.find(bus, name)
        recorded = audited(bus, "dead.requeue", name, letter.tenant)
        if letter.role == AGENT:
            async with recorded:
                response_id = await dead_letters.requeue_response(bus, letter)
            out.print(f"queued again: pagemill where {response_id}", highlight=False)
            return 0
        if not letter.request:
            raise NotFound(f"the dead letter of {name} does not contain a request to send again")
        try:
            request = decode_request(_edit(letter.request) if edit else letter.request)
        except msgspec.MsgspecError as error:
            hint = f"{error}: use --edit to correct it"
            message = f"the edited request is not valid: {error}" if edit else hint
            raise InvalidRequest(message) from error
        async with recorded:
            await dead_letters.requeue(bus, name, request)
    out.print(f"published again: pagemill follow {name}", highlight=False)
    return 0


def _print_letter(letter: DeadLetter) -> None:
    rows = {
        "request": letter.request_id,
        "failed": format_time(letter.failed_ms),
        "stage": f"{letter.role} {letter.worker}, version {letter.version}",
        "subject": letter.subject,
        "attempts": letter.attempts,
        "cause": f"{letter.error.code}: {letter.error.message}",
        "input": f"{letter.input_len} bytes",
    }
    print_rows(rows)
    for attempt in letter.history:
        print_line(f"         {format_time(attempt.began_ms)} {attempt.worker} {attempt.outcome}")
    print_line(letter.traceback)
    if letter.request:
        print_line(letter.request.decode(errors="replace"))


def _edit(data: bytes) -> bytes:
    """Open a request in the editor and return the saved text."""
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
