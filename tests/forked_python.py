"""Runs a Python program as a fork of the preloader of the tests, in place of the interpreter.

    forked_python.py [--collected] [-u] (-m MODULE | -c SCRIPT) [ARGUMENT ...]

This process imports as little as possible. It forwards signals to the program and ends as the
program does; when it is killed, the program receives SIGTERM. Without a preloader, which only runs
of pytest-xdist start for all, it becomes an ordinary interpreter.
"""

import json
import os
import signal
import socket
import struct
import sys

REPORT = struct.Struct("=id")
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def main() -> None:
    arguments = sys.argv[1:]
    # The processes of pytest-xdist are forks of one that has all modules of tests in memory too.
    is_collected = arguments[:1] == ["--collected"]
    del arguments[:is_collected]
    if "TESTS_PRELOADER" not in os.environ:
        os.execv(sys.executable, [sys.executable, *arguments])
    if arguments[:1] == ["-u"]:
        del arguments[0]
    channel = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    channel.connect(os.environ["TESTS_PRELOADER"] + "-collected" * is_collected)
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED)
    socket.send_fds(channel, [b"-"], [0])
    start = {
        "arguments": arguments,
        "env": dict(os.environ),
        "folder": os.getcwd(),
    }
    # As `shared.helpers.forking`, whose modules take longer to import.
    report, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    socket.send_fds(channel, [json.dumps(start).encode()], [theirs.fileno(), 2, 1])
    theirs.close()
    pid, _ = REPORT.unpack(report.recv(REPORT.size))
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code, _ = REPORT.unpack(report.recv(REPORT.size))
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
