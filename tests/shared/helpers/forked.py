"""A fork server with children that follow the commands of their message."""

import os
import signal
import socket
import sys

from shared.helpers.forking import ForkServer


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as channel:
        ForkServer(channel, 1, _act).serve()


def _act(message: bytes, descriptors: list[int]) -> None:
    match message.partition(b" "):
        case b"write", _, text:
            os.write(descriptors[0], text)
        case b"exit", _, code:
            sys.exit(int(code))
        case b"fail", _, _:
            raise ValueError("a mistake")
        case b"spin", _, _:
            signal.alarm(60)
            while True:
                pass
        case b"count", _, _:
            os.write(descriptors[0], b"%d" % len(os.listdir("/proc/self/fd")))
