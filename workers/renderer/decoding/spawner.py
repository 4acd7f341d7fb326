"""The spawner: a process without threads and secrets that forks a decoder process for each file.

It has imported the decoders, so that a decoder starts in a few milliseconds. It holds no bytes of
any file, so that a file that takes over its decoder cannot reach other files. The renderer starts
it by `exec`, because a fork of the renderer would copy the memory of other requests into every
decoder.
"""

import os
import socket

from shared.helpers import sandbox
from shared.helpers.forking import ForkServer
from workers.renderer.decoding import job
from workers.renderer.decoding.messages import decode_job

NUM_DESCRIPTORS = 3
"""Descriptors of a job: the socket on which its decoder answers, the file, the result's memory."""


def main(descriptor: int) -> None:
    """Fork decoders for jobs from a socket, until the socket is closed."""
    with socket.socket(fileno=descriptor) as control:
        server = ForkServer(control, NUM_DESCRIPTORS, _decode)
        sandbox.isolate()
        server.serve()


def _decode(message: bytes, descriptors: list[int]) -> None:
    """Decode one file in the forked process, and exit."""
    channel, source, target = descriptors
    os.dup2(1, 2)  # /dev/null, like stdin. Libraries write warnings about the contents of files.
    job.run(decode_job(message), socket.socket(fileno=channel), source, target)
    os._exit(0)
