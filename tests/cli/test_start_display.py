"""Lines about a start, on a terminal and elsewhere."""

import asyncio
import io
import os
import pty
import sys
from pathlib import Path

import pytest
from msgspec.structs import replace
from rich.console import Console

from shared.config.parsing import parse_config
from shared.stage.runtime import EXIT_CONFIG
from workers import settings
from workers.cli.start_display import PROGRESS_S, StartDisplay
from workers.cli.terminal import print_wrapped
from workers.cli.up import WorkerEnds, next_step
from workers.roles import WorkerSpec
from workers.supervisor.start import Observation, StartWatch


def test_plain_lines_come_at_most_every_few_seconds() -> None:
    now = 0.0
    written = io.StringIO()
    display = StartDisplay(Console(file=written), live=False, clock=lambda: now)
    display.open()
    for tenth in range(100):
        now = tenth / 10
        display.progress("engine demo", f"reading weights, {tenth} of 100 GB")
        display.progress("renderer", "warming up")
        display.tick()
    display.ready("engine demo", 10.0)
    display.close()
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    at = int(10 * PROGRESS_S)
    assert lines == [
        f"engine demo reading weights, {at} of 100 GB, 4 s",
        "renderer warming up, 4 s",
        f"engine demo reading weights, {2 * at} of 100 GB, 8 s",
        "renderer warming up, 8 s",
        "engine demo ready in 10.0 s",
    ]
    assert "\x1b" not in written.getvalue()


def test_time_counts_from_the_beginning_of_a_step_and_a_line_that_was_printed_is_enough() -> None:
    now = 0.0
    written = io.StringIO()
    display = StartDisplay(Console(file=written), live=False, clock=lambda: now)
    for second in range(14):
        now = float(second)
        display.progress("engine demo", "starting" if second < 6 else "compiling kernels")
        if second == 3:
            display.ready("renderer", 3.0)
        display.tick()
    display.ready("engine demo", 13.0)
    now = 60.0
    display.tick()
    lines = [" ".join(line.split()) for line in written.getvalue().splitlines()]
    assert lines == [
        "renderer ready in 3.0 s",
        "engine demo compiling kernels, 1 s",
        "engine demo compiling kernels, 5 s",
        "engine demo ready in 13.0 s",
    ]


def test_a_late_heartbeat_of_a_ready_worker_prints_nothing() -> None:
    now = 0.0
    written = io.StringIO()
    display = StartDisplay(Console(file=written), live=False, clock=lambda: now)
    watch = StartWatch([WorkerSpec("renderer"), WorkerSpec("engine", "demo")], 60.0, display, now)
    for second in range(20):
        now = float(second)
        watch.observe(now, {0: Observation(is_ready=second != 3), 1: Observation()})
        display.tick()
    titles = [line.split()[0] for line in written.getvalue().splitlines()]
    assert titles == ["renderer", "engine", "engine", "engine", "engine"]


def test_columns_fit_the_longest_title() -> None:
    written = io.StringIO()
    now = 0.0
    display = StartDisplay(Console(file=written), live=False, clock=lambda: now)
    titles = ("coordinator", "engine pagemill/demo-vlm", "engine pagemill/demo-vlm-large")
    for title in titles:
        display.progress(title, "starting")
    display.ready(titles[0], 1.0)
    display.ready(titles[1], 2.0)
    now = PROGRESS_S
    display.tick()
    columns = [line.index("ready") for line in written.getvalue().splitlines()[:2]]
    columns.append(written.getvalue().splitlines()[2].index("starting"))
    assert columns == 3 * [len(titles[2]) + 1]


async def test_a_terminal_counts_the_seconds_of_a_step() -> None:
    now = 0.0
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, _environ={})
    display = StartDisplay(console, live=True, clock=lambda: now)
    display.open()
    display.progress("engine demo", "compiling kernels")
    now = 15.0
    ticks = asyncio.create_task(display.keep_current())
    await asyncio.sleep(0)
    ticks.cancel()
    assert "compiling kernels, 15 s" in written.getvalue()
    display.close()


def test_a_name_is_no_markup() -> None:
    written = io.StringIO()
    display = StartDisplay(Console(file=written), live=False)
    display.say("ready at [bold]x[/] and [/nonsense]")
    assert written.getvalue() == "ready at [bold]x[/] and [/nonsense]\n"


def test_a_terminal_shows_what_starts_below_what_is_ready() -> None:
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80, _environ={})
    display = StartDisplay(console, live=True)
    display.open()
    display.progress("engine demo", "compiling kernels")
    assert "compiling kernels" in written.getvalue()
    display.progress("renderer", "warming up")
    before = written.tell()
    display.ready("engine demo", 1.0)
    assert "compiling kernels" not in written.getvalue()[before:]
    display.close()
    assert written.getvalue().count("ready in 1.0 s") == 1


def test_the_end_of_a_worker_is_a_line_and_a_refusal_is_said_once() -> None:
    written = io.StringIO()
    ends = WorkerEnds(StartDisplay(Console(file=written), live=False))
    engine = WorkerSpec("engine", "demo")
    for code in (-9, EXIT_CONFIG, EXIT_CONFIG, 1):
        ends.show(engine, code)
    lines = written.getvalue().splitlines()
    assert lines == [
        "engine of demo has ended by signal 9; another process takes over",
        "engine of demo refuses its configuration or model; `pagemill logs` says why",
        "engine of demo has ended with exit code 1; another process takes over",
    ]


class Closed(io.StringIO):
    """A terminal that was closed."""

    def write(self, _: str) -> int:
        raise OSError(5, "Input/output error")


def test_a_closed_terminal_stops_nothing() -> None:
    display = StartDisplay(Console(file=Closed(), force_terminal=True), live=True)
    display.open()
    display.progress("engine demo", "compiling kernels")
    display.ready("engine demo", 1.0)
    display.say("draining …")
    display.close()


def test_nothing_is_left_to_flush_for_a_closed_terminal() -> None:
    """Python flushes stderr at exit, and ends with code 120 when that fails."""
    terminal, end = pty.openpty()
    with os.fdopen(end, "w") as file:
        display = StartDisplay(Console(file=file), live=False)
        os.close(terminal)
        display.say("draining …")
        file.flush()


@pytest.mark.parametrize(
    ("text", "file", "command"),
    [
        ("models: {a: {path: a}}", "pagemill.yaml", "chat"),
        ("models: {a: {path: a}, b: {path: b}}", None, "chat --model a"),
        ("models: {a: {path: a, graph: qwen-image}}", None, 'draw "a red circle on blue"'),
        ("{models: {a: {path: a}}, nats: {port: 0}}", "x y.yaml", "chat -c 'x y.yaml'"),
        ("{models: {a: {path: a}}, nats: {port: 4333}}", None, "chat --nats nats://127.0.0.1:4223"),
    ],
)
def test_the_start_ends_with_the_next_command(
    text: str, file: str | None, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new terminal finds `pagemill` in `.venv`, and the note of the port in the folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    monkeypatch.setenv("PATH", str(tmp_path / ".venv" / "bin"))
    activate = tmp_path / ".venv" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    config = parse_config(text, {}, "test")
    if config.nats.port == 0:
        (tmp_path / config.nats.store_dir).mkdir(parents=True)
        settings.set_running(None, 4223)
    elif config.nats.port == 4222:
        config = replace(config, nats=replace(config.nats, port=4223))
    path = None if file is None else Path(file)
    lines = next_step(config, path, "nats://127.0.0.1:4223", "http://gate").splitlines()
    assert lines[1:] == [f"  . .venv/bin/activate && pagemill {command}", "or open http://gate"]
    (tmp_path / "pagemill").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert f"\n  pagemill {command}\n" in next_step(config, path, "nats://127.0.0.1:4223", "u")


def test_a_terminal_gets_whole_words_and_whole_commands() -> None:
    url, command = "http://127.0.0.1:8000/" + 30 * "a", "  pagemill " + 20 * "long "
    text = f"the page of the first model is at {url}, and commands show it\n{command}"
    written = io.StringIO()
    print_wrapped(Console(file=written, force_terminal=True, width=40, _environ={}), text)
    lines = written.getvalue().splitlines()
    assert lines[:2] == ["the page of the first model is at", f"{url},"]
    assert lines[-1] == command
    written = io.StringIO()
    print_wrapped(Console(file=written, width=40), text, mark="error")
    assert written.getvalue() == f"error {text}\n"
