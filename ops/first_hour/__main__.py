"""`make first-hour`: from a clean clone to a chat about an image with a pulled model, recorded.

The commands come from docs/guide/first-hour.md. They run in shells on two terminals, in an empty
home and with empty caches, unless UV_CACHE_DIR and PIP_CACHE_DIR name others. HF_ENDPOINT is a hub
on this machine. Every command must end with 0, print the expected output, and never be silent for
longer than `--max-silence`. `--busy` runs a busy loop for each core at the same time.
"""

import argparse
import contextlib
import io
import itertools
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.text import Text

from ops.first_hour.steps import MODEL, REQUEST, STEPS, STOP, Step
from ops.first_hour.terminal import DONE, WIDTH, Chunk, Screen, Terminal, TerminalTimeout
from ops.install import size_of
from tests.cli.hub_server import Hub
from workers.settings import DEMO_MODEL

ROOT = Path(__file__).parents[2]
# Variables by which this machine reaches its package index.
INHERITED = ("PIP_", "UV_", "SSL_CERT", "HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy")
# Lines of a command's output in the picture, from its beginning and its end.
HEAD, TAIL = 5, 6
# A user takes a longer silence for the end.
MAX_SILENCE_S = 6.0
# With busy loops, every step gets a part of a core.
MAX_BUSY_SILENCE_S = 12.0
_REQUEST_ID = re.compile(r"req-[0-9a-f]{16}")
_PROMPT = re.compile(r"^(\(\.venv\) )?\$ ?", re.MULTILINE)
# Lines of pip about this machine's package index.
_OF_INDEX = re.compile(r"Looking in |.*WARNING: Location ")
_SEQUENCES = re.compile(r"\x1b\[[?>\d;]*[A-Za-z]|\x1b][^\x07]*\x07")


class Outcome(NamedTuple):
    step: Step
    seconds: float
    silence_s: float
    """The longest time in which the terminal showed nothing new."""
    chunks: list[Chunk]
    failure: str | None


def environment(home: Path) -> dict[str, str]:
    """Return the variables of a new user, and those that find the package index."""
    python = shutil.which("python3") or sys.executable
    path = f"{Path(python).resolve().parent}:{os.defpath}"
    own = {"HOME": str(home), "PATH": path, "TERM": "xterm-256color", "LANG": "C.UTF-8"}
    return {k: v for k, v in os.environ.items() if k.startswith(INHERITED)} | own


def run_step(terminal: Terminal, step: Step) -> Outcome:
    """Type a command, answer its prompts, and check its exit code and output."""
    first = len(terminal.chunks)
    terminal.type(step.keys or f"{step.command}\n")
    output, failure = "", None
    try:
        for pattern, reply in step.replies:
            text, _ = terminal.wait_for(re.compile(pattern), step.timeout_s)
            output += text
            terminal.type(reply)
        is_left = step.is_left_running
        end = re.compile(f"{DONE.pattern}|{step.expect}") if is_left else DONE
        text, ended = terminal.wait_for(end, step.timeout_s)
        output += text
        plain = _SEQUENCES.sub("", output).replace("\r", "")
        if ended[1] not in ("0", None):
            failure = f"exit code {ended[1]}"
        elif not re.search(step.expect, plain, re.IGNORECASE):
            failure = f"its output has no {step.expect!r}"
    except TerminalTimeout as error:
        failure = str(error)
    chunks = terminal.chunks[first:]
    times = [chunk.at_s for chunk in chunks] or [0.0]
    gaps = [after - before for before, after in itertools.pairwise(times)]
    return Outcome(step, times[-1] - times[0], max(gaps, default=0.0), chunks, failure)


@contextlib.contextmanager
def busy_loops(count: int) -> Iterator[None]:
    command = [sys.executable, "-c", "while True: pass"]
    loops = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run(folder: Path) -> tuple[list[Outcome], int]:
    """Clone, run all commands, and return their outcomes and the bytes of the installation."""
    clone, home = folder / "pagemill", folder / "home"
    home.mkdir()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    outcomes: list[Outcome] = []
    files = {file.name: file.read_bytes() for file in DEMO_MODEL.iterdir()}
    with Hub({MODEL: files}) as hub, contextlib.ExitStack() as stack:
        terminals = []
        for _ in range(2):
            terminals.append(Terminal(clone, environment(home) | {"HF_ENDPOINT": hub.url}))
            stack.callback(terminals[-1].close)
            terminals[-1].wait_for(DONE, 60)
        for step in (*STEPS, STOP):
            command = step.command.replace(REQUEST, latest_request(outcomes))
            outcomes.append(run_step(terminals[step.terminal], step._replace(command=command)))
            _say(_row(outcomes[-1]))
            if outcomes[-1].failure:
                break
    return outcomes, size_of(clone / ".venv")


def latest_request(outcomes: list[Outcome]) -> str:
    printed = "".join(chunk.text for outcome in outcomes for chunk in outcome.chunks)
    return next(iter(_REQUEST_ID.findall(printed)[::-1]), REQUEST)


def save_svg(outcomes: list[Outcome], closing: str, file: Path) -> None:
    """Save a picture of the terminal, with the time at which each command was typed."""
    recorder = Console(record=True, width=WIDTH, file=io.StringIO(), highlight=False)
    for outcome in outcomes:
        screen = Screen()
        screen.feed("".join(chunk.text for chunk in outcome.chunks))
        command = outcome.step.command
        recorder.print(f"[dim]{clock(outcome.chunks[0].at_s)}[/] $ [bold]{escape(command)}[/]")
        for line in shortened(command, screen.text()):
            recorder.print(Text.from_ansi(line), soft_wrap=True)
    recorder.print(f"[dim]{clock(outcomes[-1].chunks[-1].at_s)}[/] [bold]{closing}[/]")
    recorder.save_svg(str(file), title="pagemill: the first hour", clear=False)


def clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def shortened(command: str, lines: list[str]) -> list[str]:
    """Return the output of a command, with a note in place of the middle if it is long.

    The command as it was typed and the shell's prompts are left out.
    """
    text = _PROMPT.sub("", "\n".join(lines)).replace("\n\n", "\n")
    typed, _, output = text.partition("\n")
    if not command.startswith(typed):
        output = text  # Keys are echoed in front of the output.
    while command.startswith(typed) and typed != command and output:
        rest, _, output = output.partition("\n")  # The terminal has wrapped it.
        typed += rest
    output_lines = [
        line for line in output.split("\n") if line.strip() and not _OF_INDEX.match(line)
    ]
    left_out = len(output_lines) - HEAD - TAIL
    if left_out <= 1:
        return output_lines
    return [*output_lines[:HEAD], f"\x1b[2m… {left_out} more lines\x1b[0m", *output_lines[-TAIL:]]


def main() -> int:
    parser = argparse.ArgumentParser(description="Run and record the first hour.")
    parser.add_argument("--busy", action="store_true", help="run one busy loop per core meanwhile")
    parser.add_argument(
        "--max-silence",
        type=float,
        metavar="SECONDS",
        help=f"by default {MAX_SILENCE_S:g}, and {MAX_BUSY_SILENCE_S:g} with --busy",
    )
    parser.add_argument("--svg", type=Path, help="save a picture of the terminal")
    arguments = parser.parse_args()
    loops = (os.cpu_count() or 1) if arguments.busy else 0
    with tempfile.TemporaryDirectory(prefix="first-hour-") as name, busy_loops(loops):
        outcomes, size = run(Path(name))
    max_silence_s = arguments.max_silence or (MAX_BUSY_SILENCE_S if loops else MAX_SILENCE_S)
    failures = [
        f"{outcome.step.command}: {reason}"
        for outcome in outcomes
        if (reason := outcome.failure or too_silent(outcome, max_silence_s))
    ]
    total_s = sum(outcome.seconds for outcome in outcomes)
    silence_s = max(outcome.silence_s for outcome in outcomes)
    machine = f"{os.cpu_count()} cores, {loops} busy loops" if loops else f"{os.cpu_count()} cores"
    closing = (
        f"{min(len(outcomes), len(STEPS))} commands in {total_s:.0f} s on {machine};"
        f" installed: {size / 1e9:.1f} GB; longest silence: {silence_s:.1f} s"
    )
    _say(closing)
    for failure in failures:
        _say(f"failed: {failure}")
    if arguments.svg and not failures:
        save_svg(outcomes, closing, arguments.svg)
    return int(bool(failures))


def too_silent(outcome: Outcome, max_silence_s: float) -> str | None:
    if outcome.silence_s <= max_silence_s:
        return None
    return f"silent for {outcome.silence_s:.1f} s, more than {max_silence_s:g} s (--max-silence)"


def _row(outcome: Outcome) -> str:
    times = f"{outcome.seconds:7.1f} s, silent for {outcome.silence_s:4.1f} s"
    return f"{times}: {outcome.step.command}"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
