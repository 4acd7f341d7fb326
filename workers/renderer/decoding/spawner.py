"""The spawner: a process without threads and secrets that forks a decoder process for each file.

It has imported the decoders, so that a decoder starts in a few milliseconds, and it holds no bytes
of any file: what one file does to its decoder cannot reach another. The renderer starts it by
`exec`, because a fork of the renderer would carry the memory of other requests into every decoder.
"""

import os
import socket

from shared.helpers.forking import ForkServer
from workers.renderer.decoding import job, sandbox
from workers.renderer.decoding.messages import decode_job

NUM_DESCRIPTORS = 3
"""Descriptors of a job: the socket on which its decoder answers, the file, the result's memory."""


def main(descriptor: int) -> None:
    """Fork decoders for the jobs that come on a socket, until it is closed."""
    with socket.socket(fileno=descriptor) as control:
        server = ForkServer(control, NUM_DESCRIPTORS, _decode)
        sandbox.isolate()
        server.serve()


def _decode(message: bytes, descriptors: list[int]) -> None:
    """Decode one file in a process of its own, which ends here."""
    channel, source, target = descriptors
    os.dup2(1, 2)  # /dev/null, as stdin is. Libraries write warnings of what is in a file.
    job.run(decode_job(message), socket.socket(fileno=channel), source, target)
    os._exit(0)
