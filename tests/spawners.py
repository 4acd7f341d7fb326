"""A server that forks spawners of decoders for the commands that tests fork."""

import os
import socket

from shared.helpers.forking import ForkServer
from workers.renderer.decoding import spawner


def main(descriptor: int) -> None:
    with socket.socket(fileno=descriptor) as control:
        ForkServer(control, 1, _spawn).serve()


def _spawn(_: bytes, descriptors: list[int]) -> None:
    os.setpgid(0, 0)
    spawner.main(*descriptors)
