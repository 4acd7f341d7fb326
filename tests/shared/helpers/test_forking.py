"""Children of a fork server: their messages, their ends, and the end of their server."""

import os
import signal
import socket
from collections.abc import Iterator
from contextlib import suppress

import pytest

from shared.helpers.forking import MAX_REPORT_BYTES, Ended, Forks, read_end, read_pid


@pytest.fixture
def forks() -> Iterator[Forks]:
    forks = Forks("tests.shared.helpers.forked")
    yield forks
    forks.close()


def start(forks: Forks, message: bytes, *descriptors: int) -> tuple[int, socket.socket]:
    report = forks.fork(message, descriptors)
    report.settimeout(60)
    return read_pid(report.recv(MAX_REPORT_BYTES)), report


def end_of(report: socket.socket) -> Ended:
    with report:
        return read_end(report.recv(MAX_REPORT_BYTES))


def read(forks: Forks, message: bytes) -> bytes:
    source, target = os.pipe()
    _, report = start(forks, message, target)
    os.close(target)
    assert end_of(report).code == 0
    with open(source, "rb") as file:
        return file.read()


def wait_for_end(pid: int) -> None:
    with suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)


def test_a_child_has_its_message_and_descriptors(forks: Forks) -> None:
    assert read(forks, b"write some text") == b"some text"


def test_exit_codes_and_signals_are_reported(forks: Forks) -> None:
    assert end_of(start(forks, b"exit 78")[1]).code == 78
    assert end_of(start(forks, b"fail")[1]).code == 1
    pid, report = start(forks, b"spin")
    os.kill(pid, signal.SIGTERM)
    assert end_of(report).code == -signal.SIGTERM


def test_a_child_has_no_descriptors_of_others(forks: Forks) -> None:
    alone = read(forks, b"count")
    others = [start(forks, b"spin")[1] for _ in range(8)]
    assert read(forks, b"count") == alone
    for report in others:
        report.close()


def test_a_child_without_a_waiter_is_killed(forks: Forks) -> None:
    pid, report = start(forks, b"spin")
    report.close()
    wait_for_end(pid)
    assert read(forks, b"write on") == b"on"


def test_children_end_with_their_server_and_the_next_child_has_another(forks: Forks) -> None:
    pid, report = start(forks, b"spin")
    server = forks.pid
    assert server is not None
    os.kill(server, signal.SIGKILL)
    with pytest.raises(ConnectionResetError, match="the fork server has ended"):
        end_of(report)
    wait_for_end(pid)
    assert read(forks, b"write on") == b"on"
    assert forks.pid != server


def test_a_closed_server_is_not_started_again(forks: Forks) -> None:
    pid, report = start(forks, b"spin")
    forks.close()
    with report, pytest.raises(BrokenPipeError):
        forks.fork(b"exit 0", [])
    wait_for_end(pid)


def test_a_client_that_is_dropped_ends_its_server() -> None:
    forks = Forks("tests.shared.helpers.forked")
    forks.start()
    pid = forks.pid
    assert pid is not None
    del forks
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_the_message_of_a_refused_fork_is_its_error() -> None:
    with pytest.raises(BlockingIOError):
        read_pid(b"\xf5\xff\xff\xff" + bytes(8))
