"""The first hour: its commands, its terminal and its recording."""

import contextlib
import os
import re
import sys
from pathlib import Path

import pytest

from ops.first_hour import __main__ as first_hour
from ops.first_hour.steps import MODEL, REQUEST, STEPS, Step
from ops.first_hour.terminal import DONE, Chunk, Screen, Terminal, TerminalTimeout
from tests.support.waiting import wait_until

ROOT = Path(__file__).parents[1]
MODEL_OF_GUIDE = "Qwen/Qwen2-VL-2B-Instruct"
BASH = {"PATH": os.defpath, "TERM": "xterm-256color"}


def shown_lines(printed: str) -> list[str]:
    screen = Screen()
    screen.feed(printed)
    return [re.sub(r"\x1b\[[\d;]*m", "", line) for line in screen.text()]


def test_the_commands_are_the_ten_of_the_guide() -> None:
    guide = (ROOT / "docs" / "guide" / "first-hour.md").read_text(encoding="utf-8")
    numbered = re.findall(r"^(\S.*?) +# +(\d+)\b", guide, re.MULTILINE)
    assert [int(number) for _, number in numbered] == [*range(1, 11)]
    commands = [command.replace(MODEL_OF_GUIDE, MODEL) for command, _ in numbered]
    assert [re.sub(r"req-[0-9a-f]{16}", REQUEST, command) for command in commands] == [
        step.command for step in STEPS
    ]


def test_progress_bars_leave_their_last_state() -> None:
    assert shown_lines("a 10%\ra 100%\r\nb") == ["a 100%", "b"]
    two = "one\r\ntwo\x1b[1A\r\x1b[2Kdone\r\n\x1b[2Kthree"
    assert shown_lines(two) == ["done", "three"]
    assert shown_lines("gone\r\ngone too\x1b[1A\r\x1b[Jleft") == ["left"]
    assert shown_lines("\x1b[?25labc\x1b[2Dx\x1b]0;title\x07") == ["axc"]


def test_long_lines_wrap_and_styles_stay_with_their_text() -> None:
    assert [len(line) for line in shown_lines("x" * 150)] == [100, 50]
    screen = Screen()
    screen.feed("\x1b[1mbold\x1b[0m plain")
    assert screen.text() == ["\x1b[0m\x1b[1mbold\x1b[0m plain"]


@pytest.fixture
def terminal(tmp_path: Path) -> Terminal:
    opened = Terminal(tmp_path, BASH)
    opened.wait_for(DONE, 30)
    return opened


def test_a_step_needs_its_exit_code_its_output_and_its_time(terminal: Terminal) -> None:
    def failure(*arguments: object, **more: object) -> str | None:
        return first_hour.run_step(terminal, Step(*arguments, **more)).failure  # type: ignore[arg-type]

    try:
        assert failure("echo one", "one") is None
        assert failure("echo one", "two") == "its output has no 'two'"
        assert failure("echo one; false", "one") == "exit code 1"
        command = "read -p 'name? ' name; echo hello $name"
        assert failure(command, "hello you", replies=(("name[?] $", "you\n"),)) is None
        late = failure("echo begun; read", "", timeout_s=0.2)
        assert late is not None
        assert "0 s without" in late
    finally:
        terminal.close()


def test_a_command_that_is_left_running_ends_with_its_output_and_by_a_key(
    terminal: Terminal,
) -> None:
    try:
        # A Ctrl-C that comes when bash has forked and before the command runs would be lost.
        left = Step("sh -c 'echo begun; exec sleep 600'", r"begun\s+$", is_left_running=True)
        assert first_hour.run_step(terminal, left).failure is None
        stopped = first_hour.run_step(terminal, Step("Ctrl-C", "", keys="\x03"))
        assert stopped.failure == "exit code 130"
        ended = Step("(exit 3)", "begun", is_left_running=True)
        assert first_hour.run_step(terminal, ended).failure == "exit code 3"
    finally:
        terminal.close()


@pytest.mark.parametrize(
    ("options", "code"), [([], 1), (["--busy"], 0), (["--max-silence", "8"], 0)]
)
def test_a_long_silence_fails(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    code: int,
) -> None:
    outcome = first_hour.Outcome(STEPS[0], 9.0, 7.0, [Chunk(0.0, ""), Chunk(9.0, "")], None)
    monkeypatch.setattr(first_hour, "run", lambda _: ([outcome], 0))
    monkeypatch.setattr(first_hour, "busy_loops", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(sys, "argv", ["first_hour", *options])
    assert first_hour.main() == code
    failure_line = "failed: make install: silent for 7.0 s, more than 6 s (--max-silence)"
    assert (failure_line in capsys.readouterr().out) == bool(code)


def test_the_latest_request_is_the_one_that_was_printed_last() -> None:
    printed = [Chunk(0.0, f"req-{16 * 'a'} 1 s\nreq-"), Chunk(0.1, f"{16 * 'b'}\n")]
    outcome = first_hour.Outcome(STEPS[7], 0.1, 0.1, printed, None)
    assert first_hour.latest_request([outcome]) == f"req-{16 * 'b'}"


def test_an_ended_shell_is_an_error(terminal: Terminal) -> None:
    terminal.type("exit\n")
    with pytest.raises(TerminalTimeout, match="the shell has ended"):
        terminal.wait_for(re.compile("never"), 30)
    terminal.close()


def test_a_closed_terminal_leaves_no_process(terminal: Terminal) -> None:
    terminal.type("nohup sleep 600 >/dev/null 2>&1 & echo job $!\n")
    _, started = terminal.wait_for(re.compile(r"job (\d+)\r"), 30)
    terminal.close()
    wait_until(lambda: state_of(int(started[1])) in (None, "Z"), 30)


def state_of(process: int) -> str | None:
    try:
        stat = Path(f"/proc/{process}/stat").read_text(encoding="utf-8")
    except OSError:
        return None
    return stat.rpartition(")")[2].split()[0]


def test_a_new_user_inherits_only_the_way_to_the_index(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("UV_INDEX_URL", "https://mirror.example")
    monkeypatch.setenv("HF_TOKEN", "secret")
    env = first_hour.environment(tmp_path)
    assert env["HOME"] == str(tmp_path)
    assert env["UV_INDEX_URL"] == "https://mirror.example"
    assert "HF_TOKEN" not in env


def test_the_picture_of_the_recording_leaves_out_the_middle_of_long_output(tmp_path: Path) -> None:
    middle = "".join(f"line {number}\r\n" for number in range(40))
    printed = f"make install\r\nLooking in links: /x\r\n{middle}$ \x1b]777;0\x07"
    chunks = [Chunk(0.5, printed[:20]), Chunk(65.0, printed[20:])]
    outcome = first_hour.Outcome(STEPS[0], 64.5, 64.5, chunks, None)
    first_hour.save_svg([outcome], "the end", tmp_path / "svg")
    text = re.sub(r"<[^>]*>", "", (tmp_path / "svg").read_text()).replace("&#160;", " ")
    for expected in (
        "0:00",
        "make install",
        "line 0",
        "29 more lines",
        "line 39",
        "1:05",
        "the end",
    ):
        assert expected in text
    assert "Looking in" not in text
    assert "line 20" not in text
