"""Signals of commands, and text that does not steer the terminal."""

import asyncio
import io
import os
import signal
import string
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import UnknownModel
from shared.protocol.records import error_info
from tests.cli.fake_terminal import FakeTerminal
from workers.cli import terminal, up
from workers.cli.ask import print_error
from workers.cli.commands.run import START
from workers.cli.terminal import (
    EXIT_INTERRUPTED,
    call_on_signals,
    harmless,
    print_json,
    print_line,
    print_note,
    print_refusal,
    write_text,
)

STEERING = "a[b]\x1b]52;c;x\x07\x9b2J\tc"
HARMLESS = "a[b]\ufffd]52;c;x\ufffd\ufffd2J\tc"


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    handlers = [signal.getsignal(number) for number in numbers]
    yield
    for number, handler in zip(numbers, handlers, strict=True):
        signal.signal(number, handler)


async def test_the_end_of_a_terminal_may_do_less_than_ctrl_c() -> None:
    interrupted, hung_up = asyncio.Event(), asyncio.Event()
    call_on_signals(interrupted.set, on_hangup=hung_up.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await hung_up.wait()
    assert not interrupted.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await interrupted.wait()


async def test_the_end_of_a_terminal_is_like_ctrl_c_by_default() -> None:
    stopped = asyncio.Event()
    call_on_signals(stopped.set)
    os.kill(os.getpid(), signal.SIGHUP)
    await stopped.wait()


async def test_under_nohup_the_end_of_the_terminal_stays_ignored() -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    call_on_signals(lambda: None)
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


async def test_a_signal_before_the_work_has_begun_ends_it() -> None:
    stopping = asyncio.Event()
    stopping.set()

    async def work() -> int:
        return await asyncio.sleep(60, 0)

    stop = asyncio.create_task(stopping.wait())
    assert await up._until(stop, work) == EXIT_INTERRUPTED


@pytest.mark.parametrize(
    ("module", "code"), [("cyclopts", -signal.SIGINT), ("uvloop", EXIT_INTERRUPTED)]
)
def test_ctrl_c_during_imports_is_no_traceback(tmp_path: Path, module: str, code: int) -> None:
    interrupt = "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\n"
    (tmp_path / f"{module}.py").write_text(interrupt)
    command = [sys.executable, "-c", START, "run"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (code, b"")


# Streams that a process has in place of the ones that its caller has closed.
REPLACED = """
import os, socket, sys
from workers.cli.terminal import replace_closed_streams
replace_closed_streams()
opened = socket.socket().fileno()
nulls = [n for n in range(3) if os.readlink(f"/proc/self/fd/{n}") == os.devnull]
inherited = [n for n in range(3) if os.get_inheritable(n)]
numbers = sys.stdout.fileno(), sys.stderr.fileno()
with open(sys.argv[1], "w") as file:
    print(opened > 2, nulls, inherited, *numbers, file=file)
"""


@pytest.mark.parametrize(
    ("closed", "nulls"),
    [("", []), (">&-", [1]), ("<&- 2>&-", [0, 2]), ("<&- >&- 2>&-", [0, 1, 2])],
)
def test_nothing_else_gets_the_number_of_a_closed_stream(
    tmp_path: Path, closed: str, nulls: list[int]
) -> None:
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, "-c", REPLACED, "seen"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        input=b"",
        capture_output=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert (tmp_path / "seen").read_text() == f"True {nulls} [0, 1, 2] 1 2\n"


def test_no_line_that_is_printed_steers_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    error = UnknownModel(STEERING)
    print_line(STEERING)
    print_note(STEERING)
    print_refusal(error)
    print_error(error_info(error))
    output = capsys.readouterr()
    # rich writes a tab as spaces.
    line = HARMLESS.expandtabs(8)
    refused = f"error unknown_model: {HARMLESS}".expandtabs(8)
    assert output.out.splitlines() == [line]
    assert output.err.splitlines() == [line, refused, refused]


def test_a_note_is_repeated_while_its_work_takes_long(monkeypatch: pytest.MonkeyPatch) -> None:
    printed: list[str] = []
    thrice = threading.Event()

    def say(text: str) -> None:
        printed.append(text)
        if len(printed) == 3:
            thrice.set()

    monkeypatch.setattr(terminal, "print_note", say)
    monkeypatch.setattr(terminal, "NOTE_S", 0.001)
    with terminal.noted("checking …"):
        assert thrice.wait(60)
    assert set(printed) == {"checking …"}
    num_threads = threading.active_count()
    monkeypatch.setattr(terminal, "NOTE_S", 600.0)
    with terminal.noted("checking …"):
        printed.clear()
    assert printed == []
    assert threading.active_count() == num_threads


def test_texts_are_harmless_on_a_terminal_and_unchanged_in_a_pipe(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for out, text in ((FakeTerminal(), HARMLESS), (io.StringIO(), STEERING)):
        monkeypatch.setattr("sys.stdout", out)
        write_text(STEERING)
        assert out.getvalue() == text


@given(st.text())
def test_no_text_steers_the_terminal(text: str) -> None:
    output = harmless(text)
    assert len(output) == len(text)
    steering = {chr(n) for n in (*range(32), *range(127, 160))} - {"\n", "\t"}
    assert not steering & set(output)
    assert all(a == b for a, b in zip(text, output, strict=True) if a in string.printable[:95])


def test_json_on_a_terminal_is_harmless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", out := FakeTerminal())
    print_json({"model": "\x9b2J"})
    assert out.getvalue() == '{"model":"\ufffd2J"}\n'
