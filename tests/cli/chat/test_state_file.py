"""The file from which `pagemill chat --resume` continues."""

import os
import pwd
from pathlib import Path

import pytest

from shared.errors import ConfigError, NotFound
from workers.cli.chat import state_file
from workers.cli.chat.conversation import Conversation


def test_the_file_is_private_and_replaced_at_once(tmp_path: Path) -> None:
    path = tmp_path / "state" / "chat.json"
    os.umask(os.umask(0))
    first = Conversation("demo", unfinished="req-1")
    state_file.write(path, first)
    before = path.stat().st_ino
    state_file.write(path, Conversation("other"))
    assert path.stat().st_ino != before
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o077 == 0
    assert state_file.read(path) == Conversation("other")
    assert [entry.name for entry in path.parent.iterdir()] == ["chat.json"]


def test_a_write_that_fails_leaves_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "chat.json"
    state_file.write(path, Conversation("demo"))

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        state_file.write(path, Conversation("other"))
    assert state_file.read(path) == Conversation("demo")
    assert [entry.name for entry in tmp_path.iterdir()] == ["chat.json"]


@pytest.mark.parametrize("data", [None, b"", b"{}", b"[]", b"\xff", b'{"model": 5}'])
def test_a_file_that_is_no_conversation_is_named(tmp_path: Path, data: bytes | None) -> None:
    path = tmp_path / "chat.json"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(NotFound, match=r"chat\.json holds no conversation"):
        state_file.read(path)


@pytest.mark.parametrize("given", ["", "relative"])
def test_the_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "x"))
    assert state_file.find_path() == tmp_path / "x" / "pagemill" / "chat.json"
    monkeypatch.setenv("XDG_STATE_HOME", given)
    assert state_file.find_path() == tmp_path / ".local" / "state" / "pagemill" / "chat.json"


def test_a_user_without_a_home_directory_is_told_what_to_set(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def no_entry(_: int) -> None:
        raise KeyError

    monkeypatch.setattr(pwd, "getpwuid", no_entry)
    monkeypatch.delenv("HOME")
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    with pytest.raises(ConfigError, match="set HOME or XDG_STATE_HOME"):
        state_file.find_path()
