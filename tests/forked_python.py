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
import sys

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
        "type": "Start",
        "arguments": arguments,
        "env": dict(os.environ),
        "folder": os.getcwd(),
    }
    socket.send_fds(channel, [json.dumps(start).encode()], [2, 1])
    event = json.loads(channel.recv(1 << 17))
    pid = event["pid"]
    for number in FORWARDED:
        signal.signal(number, lambda number, _: os.kill(pid, number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED)
    code = json.loads(channel.recv(1 << 17))["code"]
    if code < 0:
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


main()
