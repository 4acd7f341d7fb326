"""The loop of `pagemill chat` with a connection that breaks."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from shared.errors import Overloaded, Unavailable
from shared.protocol.records import ChoiceDelta, Finish, LogRecord, TokenChunk, Usage
from workers.cli.chat import state_file
from workers.cli.chat.answer import Answer
from workers.cli.chat.connection import Connection
from workers.cli.chat.conversation import Conversation
from workers.cli.chat.lines import LONG_MESSAGES
from workers.cli.chat.session import Session

LOG: list[LogRecord] = [
    TokenChunk(0, 1, [ChoiceDelta(0, 0, [1], "Hello ")]),
    TokenChunk(1, 1, [ChoiceDelta(0, 1, [2], "world", "stop")]),
    Finish(2, 1, Usage(5, 2), 0, []),
]


class BreakingConnection:
    """Raises the given errors, each after one more record; then reads all."""

    def __init__(self, *broken: BaseException | type[KeyboardInterrupt]) -> None:
        self._errors = list(broken)
        self.cancelled: list[str] = []
        self.asked: list[bool] = []

    def read_answer(
        self,
        conversation: Conversation,
        answer: Answer,
        show: Callable[[str], None],
        *,
        is_new: bool,
    ) -> None:
        self.asked.append(is_new)
        for record in LOG[answer.next_index :]:
            show(answer.add(record))
            if self._errors:
                raise self._errors.pop(0)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


def talk(
    monkeypatch: pytest.MonkeyPatch, state: Path, connection: BreakingConnection, *lines: str
) -> tuple[Conversation, int]:
    data = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
    conversation = Conversation("demo")
    session = Session(conversation, cast(Connection, connection), state)
    return conversation, session.run(resume=False)


def contents(conversation: Conversation) -> list[object]:
    return [message.content for message in conversation.messages()]


def test_an_answer_that_broke_off_goes_on_where_it_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = BreakingConnection(Unavailable("the broker is gone"))
    state = tmp_path / "chat.json"
    conversation, code = talk(monkeypatch, state, connection, "Hi", "/resume", "/resume")
    said = capsys.readouterr()
    assert said.out == "Hello world\n"
    assert "is unfinished: /resume continues it" in said.err
    assert "no answer is unfinished" in said.err
    assert contents(conversation) == ["Hi", "Hello world"]
    assert (connection.asked, code) == ([True, False], 1)
    assert state_file.read(state) == conversation


def test_what_there_is_of_an_answer_stays_if_the_next_message_comes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connection = BreakingConnection(Unavailable("the broker is gone"))
    conversation, _ = talk(monkeypatch, tmp_path / "chat.json", connection, "Hi", "Again")
    assert contents(conversation) == ["Hi", "Hello ", "Again", "Hello world"]
    assert conversation.entries[1].is_interrupted


def test_ctrl_c_cancels_and_keeps_the_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = BreakingConnection(KeyboardInterrupt)
    conversation, code = talk(monkeypatch, tmp_path / "chat.json", connection, "Hi")
    assert connection.cancelled == conversation.request_ids
    assert contents(conversation) == ["Hi", "Hello "]
    assert "interrupted" in capsys.readouterr().err
    assert code == 0


def test_a_refused_request_can_be_tried_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    connection = BreakingConnection(Overloaded("the queue\nis [full]\x1b[2J"))
    monkeypatch.setattr("tests.cli.chat.test_session.LOG", [LOG[2]])
    conversation, code = talk(monkeypatch, tmp_path / "chat.json", connection, "Hi", "/retry")
    assert "overloaded: the queue is [full]\N{REPLACEMENT CHARACTER}[2J" in capsys.readouterr().err
    assert contents(conversation) == ["Hi", ""]
    assert (len(conversation.request_ids), code) == (2, 1)


def test_a_state_file_that_cannot_be_written_is_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    state = tmp_path / "file" / "chat.json"
    conversation, code = talk(monkeypatch, state, BreakingConnection(), "Hi", "Hi")
    assert capsys.readouterr().err.count("--resume will not find this conversation") == 1
    assert (len(conversation.entries), code) == (4, 0)


@pytest.mark.parametrize(
    "broken",
    [OSError(28, "No space\nleft"), RuntimeError("No space left"), ValueError("No space left")],
)
def test_a_turn_that_fails_is_told_in_one_line_and_the_chat_goes_on(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    broken: Exception,
) -> None:
    connection = BreakingConnection(broken)
    conversation, code = talk(monkeypatch, tmp_path / "chat.json", connection, "Hi", "Again")
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error")]
    assert line.startswith(f"error {type(broken).__name__}: ")
    assert line.endswith("No space left")
    assert contents(conversation) == ["Hi", "Hello ", "Again", "Hello world"]
    assert code == 1


def test_the_end_of_the_reader_of_the_answers_ends_the_chat(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    connection = BreakingConnection(BrokenPipeError())
    with pytest.raises(BrokenPipeError):
        talk(monkeypatch, tmp_path / "chat.json", connection, "Hi", "Again")


def test_a_path_that_has_no_meaning_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("@~no-such-user/a.png what is it?", "/save a\0b", "/history")
    _, code = talk(monkeypatch, tmp_path / "chat.json", BreakingConnection(), *lines)
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == [
        "error RuntimeError",
        "error ValueError",
    ]
    assert code == 1


def test_a_video_is_not_left_out_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("clip.mp4", "a.wav", "notes.txt"):
        Path(name).write_bytes(b"")
    line = "@clip.mp4 and @a.wav but not @missing.mp4 nor @notes.txt"
    conversation, _ = talk(monkeypatch, tmp_path / "chat.json", BreakingConnection(), line)
    assert contents(conversation)[0] == line
    noted = [line for line in capsys.readouterr().err.splitlines() if "not attached" in line]
    assert noted == [
        "clip.mp4 is not attached: `pagemill ask --video` asks about such a file",
        "a.wav is not attached: `pagemill ask --audio` asks about such a file",
    ]


def test_bytes_that_are_no_text_are_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    state = tmp_path / "chat.json"
    conversation, code = talk(monkeypatch, state, BreakingConnection(), "caf\udce9")
    assert (contents(conversation)[0], code) == ("caf\N{REPLACEMENT CHARACTER}", 0)


def test_a_message_may_have_several_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    state = tmp_path / "chat.json"
    lines = ("one\\", "two", '"""', "/three", "", 'four"""', "/system be\\", "brief", "five\\")
    conversation, _ = talk(monkeypatch, state, BreakingConnection(), *lines)
    assert contents(conversation)[::2] == ["be\nbrief", "Hello world", "Hello world", "Hello world"]
    said = [message.content for message in conversation.messages() if message.role == "user"]
    assert said == ["one\ntwo", "/three\n\nfour", "five\\"]


def test_the_help_tells_how_to_write_several_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, tmp_path / "chat.json", BreakingConnection(), "/help")
    assert LONG_MESSAGES in capsys.readouterr().out.splitlines()
