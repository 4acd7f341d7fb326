"""The command `pagemill logs`."""

import asyncio
import contextlib
import sys
from typing import Annotated

from cyclopts import Parameter
from cyclopts.validators import Number
from rich.text import Text

from shared.errors import ConfigError
from shared.telemetry.logs import Level
from workers import settings
from workers.cli.options import ConfigFile, load
from workers.cli.terminal import call_on_signals, out, write_text
from workers.supervisor.log_file import Filter, LogReader, parse, render

POLL_S = 0.2
STYLES = {"debug": "dim", "warning": "yellow", "error": "red", "critical": "bold red"}


async def logs(
    *,
    follow: Annotated[bool, Parameter(name=["--follow", "-f"])] = False,
    lines: Annotated[int, Parameter(name=["--lines", "-n"], validator=Number(gte=0))] = 50,
    role: str | None = None,
    level: Level | None = None,
    worker: str | None = None,
    request: str | None = None,
    json: bool = False,
    config: ConfigFile = None,
) -> int:
    """Print the last lines of the log of `pagemill up`, and with -f also new lines.

    Parameters
    ----------
    follow
        Print new lines as they are written, until Ctrl-C.
    lines
        Print at most this many of the last lines that match.
    role
        Print only lines of workers of this role; `up` selects lines of `pagemill up` itself.
    level
        Print only lines of this level or a more severe one.
    worker
        Print only lines of workers whose id begins with this text.
    request
        Print only lines about the request with this id.
    json
        Print the lines as they are in the file.
    """
    file = settings.find_log_file(load(config))
    if file is None:
        raise ConfigError("log_file: the log goes to stderr, not to a file", field="log_file")
    reader = LogReader(file, Filter(role, level, worker, request))
    try:
        _print_lines(reader.last(lines), json)
        if follow:
            following = asyncio.create_task(_follow(reader, json))
            call_on_signals(following.cancel)
            with contextlib.suppress(asyncio.CancelledError):
                await following
    finally:
        reader.close()
    return 0


async def _follow(reader: LogReader, as_json: bool) -> None:
    while True:
        _print_lines(reader.more(), as_json)
        await asyncio.sleep(POLL_S)


def _print_lines(lines: list[bytes], as_json: bool) -> None:
    for line in lines:
        if as_json and not sys.stdout.isatty():
            sys.stdout.buffer.write(line.rstrip(b"\n") + b"\n")
        elif as_json:
            write_text(line.decode(errors="replace").rstrip("\n") + "\n")
        else:
            event = parse(line) or {}
            style = STYLES.get(str(event.get("level")), "")
            out.print(Text(render(line), style=style), soft_wrap=True, highlight=False)
    sys.stdout.flush()
