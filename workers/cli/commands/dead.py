"""Commands about dead letters: `pagemill dead list`, `show`, `requeue` and `drop`."""

import contextlib
import os
import shlex
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Annotated

import msgspec
from cyclopts import App, Parameter

from shared.errors import InvalidRequest, NotFound
from shared.protocol.encoding import is_packed
from shared.protocol.requests import decode_request
from shared.state import dead_letters
from shared.state.dead_letters import StoredLetter
from workers.cli.audited import audited
from workers.cli.broker import connected
from workers.cli.options import ConfigFile, Json, NatsUrl, find_login
from workers.cli.terminal import (
    format_age,
    format_time,
    out,
    print_columns,
    print_json,
    print_line,
    print_rows,
)
from workers.roles import AGENT

Letter = Annotated[
    str,
    Parameter(
        help="Key of the dead letter, as `pagemill dead list` shows it, or its name for the latest"
        " one: the id of a request, or `batch:` or `response:` and an id. If several tenants use"
        " the id, ID@TENANT names the letter of one."
    ),
]
COLUMNS = ("key", "age", "tries", "code", "name", "message")

dead = App(name="dead", help="Inspect, requeue and drop requests that no attempt could answer.")


@dead.command(name="list")
async def list_letters(
    *, limit: int = 50, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """List dead letters, the newest first.

    Parameters
    ----------
    limit
        Maximum number of letters.
    """
    rows = [COLUMNS]
    async with connected(find_login(config, nats), "dead") as bus:
        async for key, name, letter in dead_letters.read_newest(bus, limit):
            if json:
                summary = {
                    "key": key,
                    "name": name,
                    "failed_ms": letter.failed_ms,
                    "role": letter.role,
                    "attempts": letter.attempts,
                    "code": letter.error.code,
                    "message": letter.error.message,
                    "tenant": letter.tenant,
                }
                print_json(summary)
            age, tries = format_age(time.time() - letter.failed_ms / 1000), str(letter.attempts)
            message = " ".join(letter.error.message.split())
            rows.append((key, age, tries, letter.error.code, name, message))
    if json:
        return 0
    print_columns(rows, cuts=True) if len(rows) > 1 else print_line("no dead letters")
    return 0


@dead.command(name="show")
async def show_letter(
    letter: Letter, /, *, json: Json = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Print one dead letter: cause, attempts, traceback, and the request itself."""
    async with connected(find_login(config, nats), "dead") as bus:
        stored = await dead_letters.find(bus, letter)
    print_json(stored.letter) if json else _print_letter(stored)
    return 0


@dead.command(name="drop")
async def drop_letter(letter: Letter, /, *, config: ConfigFile = None, nats: NatsUrl = None) -> int:
    """Delete one dead letter. The answer of its request, which is the error, stays."""
    async with connected(find_login(config, nats), "dead") as bus:
        key, name, content = await dead_letters.find(bus, letter)
        async with audited(bus, "dead.drop", name, content.tenant):
            await dead_letters.drop(bus, key)
    print_line(f"dropped {key}, a letter of {name}")
    return 0


@dead.command(name="requeue")
async def requeue_letter(
    letter: Letter, /, *, edit: bool = False, config: ConfigFile = None, nats: NatsUrl = None
) -> int:
    """Publish the request of a dead letter again, under the same id, or continue a response.

    Parameters
    ----------
    edit
        Open the request in $EDITOR first.
    """
    async with connected(find_login(config, nats), "dead") as bus:
        _, name, content = await dead_letters.find(bus, letter)
        recorded = audited(bus, "dead.requeue", name, content.tenant)
        if content.role == AGENT:
            async with recorded:
                response_id = await dead_letters.requeue_response(bus, content)
            out.print(f"queued again: pagemill where {response_id}", highlight=False)
            return 0
        if not content.request:
            raise NotFound(f"the dead letter of {name} does not contain a request to send again")
        try:
            request = decode_request(_edit(content.request) if edit else content.request)
        except msgspec.MsgspecError as error:
            hint = f"{error}: use --edit to correct it"
            message = f"the edited request is not valid: {error}" if edit else hint
            raise InvalidRequest(message) from error
        async with recorded:
            await dead_letters.requeue(bus, name, request)
    out.print(f"published again: pagemill follow {name}", highlight=False)
    return 0


def _print_letter(stored: StoredLetter) -> None:
    letter = stored.letter
    rows = {
        "key": stored.key,
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
    if letter.error.fault != "client":
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
