"""The layers of the sandbox, each alone, and on machines that lack some of them."""

import ctypes
import errno
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from shared.helpers import landlock, sandbox, syscall_filter

needs_landlock = pytest.mark.skipif(landlock.find_version() == 0, reason="needs Landlock")
EM = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
REFUSE, ALLOW = 0x00050000 | errno.EPERM, 0x7FFF0000
PID = 4321


def in_child(act: Callable[[], object]) -> str:
    """Return what `act` does in a forked process: the name of its OSError, or what it returns."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        try:
            theirs.send(str(act()).encode())
        except OSError as error:
            theirs.send(errno.errorcode[error.errno or 0].encode())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        text = ours.recv(1000).decode()
    os.waitpid(pid, 0)
    return text


def restricted(act: Callable[[], object]) -> str:
    """Return what `act` does with Landlock as the only layer."""

    def run() -> object:
        give_up_privileges()
        assert landlock.restrict()
        return act()

    return in_child(run)


def give_up_privileges() -> None:
    """Set `no_new_privs`."""
    ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)


@needs_landlock
def test_landlock_alone_refuses_paths(tmp_path: Path) -> None:
    file, folder = tmp_path / "file", tmp_path / "folder"
    file.touch()
    folder.mkdir()
    attempts: dict[str, Callable[[], object]] = {
        "open for reading": lambda: os.open(file, os.O_RDONLY),
        "open for writing": lambda: os.open(file, os.O_WRONLY),
        "list": lambda: os.listdir(folder),
        "create": lambda: os.open(folder / "new", os.O_CREAT | os.O_WRONLY),
        "rename": lambda: file.rename(tmp_path / "renamed"),
        "unlink": lambda: file.unlink(),
        "link": lambda: os.link(file, folder / "link"),
        "symlink": lambda: os.symlink(file, folder / "symlink"),
        "mkdir": lambda: os.mkdir(folder / "made"),
        "rmdir": lambda: folder.rmdir(),
        "mkfifo": lambda: os.mkfifo(folder / "fifo"),
        "exec": lambda: os.execv("/bin/true", ["true"]),
    }
    if landlock.find_version() >= 3:
        attempts["truncate"] = lambda: os.truncate(file, 0)
    outcomes = {name: restricted(act) for name, act in attempts.items()}
    # A link to another folder is refused as if the folder were on another disk.
    assert outcomes == dict.fromkeys(attempts, "EACCES") | {"link": outcomes["link"]}
    assert outcomes["link"] in ("EACCES", "EXDEV")


@needs_landlock
def test_a_confined_process_is_restricted_by_landlock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without seccomp and an empty root, nothing else protects files that are not opened."""
    monkeypatch.setattr(syscall_filter, "_ARCHITECTURES", {})
    file = tmp_path / "file"
    file.touch()

    def remove() -> None:
        give_up_privileges()
        sandbox.confine(5, 2**33, 0)
        file.unlink()

    assert in_child(remove) == "EACCES"
    assert file.exists()


@pytest.mark.skipif(landlock.find_version() < landlock.SCOPES, reason="needs scopes of Landlock")
def test_landlock_alone_refuses_signals_and_abstract_sockets() -> None:
    victim = subprocess.Popen(["sleep", "600"])
    name = f"\0pagemill-test-{os.getpid()}"
    try:
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(name)
            listener.listen()
            assert restricted(lambda: os.kill(victim.pid, signal.SIGTERM)) == "EPERM"
            assert restricted(lambda: socket.socket(socket.AF_UNIX).connect(name)) == "EPERM"
        assert restricted(lambda: os.kill(os.getpid(), 0)) == "None"
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_without_landlock_and_seccomp_the_other_layers_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Numbers that no kernel and no processor has.
    monkeypatch.setattr(landlock, "_CREATE_RULESET", 9999)
    monkeypatch.setattr(syscall_filter, "_ARCHITECTURES", {})
    assert sandbox.missing() == ["Landlock", "seccomp"]

    def read() -> object:
        sandbox.isolate()
        sandbox.confine(5, 2**33, 0)
        return os.stat("/etc/passwd")

    # Any user may read the attributes of this file, but not enter the new root, which is empty.
    assert in_child(read) in ("ENOENT", "EACCES")


def test_an_ordinary_user_keeps_no_capability() -> None:
    """In its user namespace, a process has all of them at first."""

    def capabilities() -> object:
        if os.geteuid() == 0:
            os.setgid(sandbox.NOBODY)
            os.setuid(sandbox.NOBODY)
        sandbox.isolate()
        held = (ctypes.c_uint32 * 6)()
        ctypes.CDLL(None).capget((ctypes.c_uint32 * 2)(0x20080522, 0), held)
        return list(held)

    assert in_child(capabilities) == str([0] * 6)


def test_a_kernel_without_scopes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(landlock, "find_version", lambda: landlock.SCOPES - 1)
    monkeypatch.setattr(syscall_filter, "is_available", lambda: True)
    assert sandbox.missing() == ["scopes of Landlock"]


def result(
    column: int, number: int, arguments: tuple[int, ...] = (), machine: int | None = None
) -> int:
    """Return what the kernel does with a call, by the meaning of the instructions."""
    program = syscall_filter._compile(column, PID)
    words = {0: number, 4: list(EM.values())[column] if machine is None else machine}
    words |= {16 + 8 * place: value for place, value in enumerate(arguments)}
    loaded, place = 0, 0
    while program[place].code != 0x06:
        step = program[place]
        if step.code == 0x20:
            loaded = words.get(step.value, 0)
            place += 1
        else:
            assert step.code == 0x15
            place += 1 + (step.on_true if loaded == step.value else step.on_false)
    return int(program[place].value)


@pytest.mark.parametrize("column", [0, 1], ids=list(EM))
def test_a_program_allows_the_calls_of_the_list_alone(column: int) -> None:
    allowed = {numbers[column] for numbers in syscall_filter._ALLOWED.values()} - {None}
    assert {n for n in range(1024) if result(column, n) == ALLOW} == allowed
    kill, signal_thread, stat = [(62, 129), (234, 131), (262, 79)]
    for numbers in (kill, signal_thread):
        assert result(column, numbers[column], (PID,)) == ALLOW
        assert result(column, numbers[column], (PID + 1,)) == REFUSE
        assert result(column, numbers[column], (2**32 - 1,)) == REFUSE
    assert result(column, stat[column], (1, 0, 0, 0x1000)) == ALLOW
    assert result(column, stat[column], (1, 0, 0, 0)) == REFUSE


@pytest.mark.parametrize("column", [0, 1], ids=list(EM))
def test_a_program_refuses_calls_of_another_processor(column: int) -> None:
    """A process of x86_64 can also make the calls of its predecessors and of x32."""
    for machine in (0x40000003, 0):
        assert result(column, 0, machine=machine) == REFUSE
    assert result(column, 0x40000000) == REFUSE


def test_the_numbers_are_those_of_the_system() -> None:
    """The C library's calls, which have no number in Python, are allowed by these numbers."""
    if not syscall_filter.is_available():
        pytest.skip("needs seccomp on a known processor")

    def compute() -> object:
        sandbox.isolate()
        sandbox.confine(5, 2**33, 0)
        os.kill(os.getpid(), 0)
        return len(os.urandom(4)), os.getpid() > 0, os.fstat(1).st_size >= 0, len(bytearray(2**24))

    assert in_child(compute) == str((4, True, True, 2**24))
