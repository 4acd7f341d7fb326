"""The log of `pagemill up`, read by `pagemill logs`."""

import json
from pathlib import Path

import pytest

from shared.errors import ConfigError, NotFound
from workers.supervisor import log_file
from workers.supervisor.log_file import Filter, LogReader, errors_since, open_for_append, render


def line(event: str, **fields: object) -> bytes:
    return json.dumps({"event": event, **fields}).encode() + b"\n"


ENGINE = {"role": "engine", "worker": "engine-1a"}
LINES = [
    line("ready", level="info", timestamp="2026-01-02T03:04:05.678901Z", **ENGINE, models=["m"]),
    line("claimed", level="debug", **ENGINE, request_id="req-1"),
    b"Traceback of a process that could not start\n",
    line("expired", level="warning", role="coordinator", worker="coordinator-2b", request_id="r-1"),
    line("stopped", level="error", **ENGINE, reason="models.path: nothing there"),
]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "pagemill.log"
    file.write_bytes(b"".join(LINES))
    return file


def last(file: Path, num_lines: int, criteria: Filter) -> list[bytes]:
    reader = LogReader(file, criteria)
    try:
        return [line + b"\n" for line in reader.last(num_lines)]
    finally:
        reader.close()


@pytest.mark.parametrize(
    ("fields", "numbers"),
    [
        ({}, [0, 1, 2, 3, 4]),
        ({"role": "engine"}, [0, 1, 4]),
        ({"role": "eng"}, []),
        ({"level": "debug"}, [0, 1, 3, 4]),
        ({"level": "warning"}, [3, 4]),
        ({"worker": "engine-1a"}, [0, 1, 4]),
        ({"worker": "coordinator-"}, [3]),
        ({"request": "req-1"}, [1]),
        ({"request": "req-1", "level": "info"}, []),
    ],
)
def test_filters(file: Path, fields: dict[str, str], numbers: list[int]) -> None:
    assert last(file, 99, Filter(**fields)) == [LINES[number] for number in numbers]


@pytest.mark.parametrize("block", [1, 7, 65_536])
def test_the_last_lines_are_found_from_the_end(
    file: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "BLOCK_BYTES", block)
    for num_lines in range(len(LINES) + 2):
        assert last(file, num_lines, Filter()) == LINES[len(LINES) - min(num_lines, len(LINES)) :]
    assert last(file, 1, Filter(role="engine", level="info")) == [LINES[4]]


@pytest.mark.parametrize("block", [1, 65_536])
def test_a_line_is_followed_when_it_is_complete(
    file: Path, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_file, "BLOCK_BYTES", block)
    with file.open("ab", buffering=0) as appended:
        appended.write(LINES[0][:9])
        reader = LogReader(file, Filter())
        assert reader.last(2) == [text.rstrip() for text in LINES[-2:]]
        assert reader.more() == []
        appended.write(LINES[0][9:])
        assert reader.more() == [LINES[0]]
        assert reader.more() == []
    # The operator rotates the file, which is copied and emptied, or moved away.
    file.write_bytes(LINES[3])
    assert reader.more() == [LINES[3]]
    file.rename(file.with_suffix(".1"))
    assert reader.more() == []
    file.write_bytes(LINES[4])
    assert reader.more() == [LINES[4]]
    reader.close()


def test_a_missing_log_is_an_error_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"nowhere\.log"):
        LogReader(tmp_path / "nowhere.log", Filter())


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "occupied").write_text("")
    with (
        pytest.raises(ConfigError, match=r"log_file: .*occupied/x\.log"),
        open_for_append(tmp_path / "occupied" / "x.log"),
    ):
        pass


def test_a_log_is_appended_to_and_only_its_owner_reads_it(tmp_path: Path) -> None:
    file = tmp_path / "new" / "x.log"
    for _ in range(2):
        with open_for_append(file) as fd:
            assert isinstance(fd, int)
            file.write_bytes(file.read_bytes() + LINES[0])
    assert file.read_bytes() == 2 * LINES[0]
    assert file.stat().st_mode & 0o777 == 0o600


def test_errors_of_this_start_are_found(file: Path) -> None:
    offset = file.stat().st_size
    assert errors_since(file, offset) == []
    with file.open("ab") as appended:
        appended.write(LINES[0] + LINES[4])
    assert [text.split()[:3] for text in errors_since(file, offset)] == [
        ["error", "engine-1a", "stopped"]
    ]
    assert errors_since(None, 0) == []


def test_lines_for_people() -> None:
    assert render(LINES[0]).split() == [
        "2026-01-02",
        "03:04:05.678",
        "info",
        "engine-1a",
        "ready",
        'models=["m"]',
    ]
    assert render(LINES[4]).endswith('stopped reason="models.path: nothing there"')
    assert render(LINES[2]) == LINES[2].decode().rstrip()
    traced = render(line("failed", level="error", exception="Traceback:\n  KeyError\x1b[2J"))
    assert [text.strip() for text in traced.splitlines()[1:]] == [
        "Traceback:",
        r"KeyError\x1b[2J",
    ]


@pytest.mark.parametrize("name", ["\x1b[2J", "a\nb", "\x9b2J", "\u202e"])
def test_a_clients_name_does_not_control_the_terminal(name: str) -> None:
    for text in (render(line("x", key=name)), render(line(name)), render(name.encode())):
        assert all(c.isprintable() for c in text)
