"""A spawner of decoders that follow commands in the file instead of decoding it."""

import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from workers.renderer.decoding import formats, job, spawner
from workers.renderer.decoding.containers import Bytes
from workers.renderer.decoding.document_file import DocumentFile
from workers.renderer.decoding.messages import AudioProbe, DecodingLimits, Reply, VideoProbe
from workers.renderer.decoding.video_file import Pixels, VideoFile

open_video = formats.open_video


class CostlyVideo:
    """A video of which no more than one frame can be read."""

    probe = VideoProbe(8, 8, 9, 1.0, "costly")

    def frames(self, indexes: Sequence[int]) -> Iterator[Pixels]:
        if len(indexes) > 1:
            os.abort()
        yield np.zeros((8, 8, 3), np.uint8)


class SleepingDocument(DocumentFile):
    def __init__(self, data: Bytes, limits: DecodingLimits) -> None:
        time.sleep(60)
        super().__init__(data, limits)


class LateSound:
    """A sound whose decoder ends with the order that follows its samples unread."""

    probe = AudioProbe(8000, 1, 8, "late")

    def blocks(self) -> Iterator[NDArray[np.float32]]:
        yield np.zeros((8, 1), np.float32)
        vars(job)["_send"] = send_after_order


send = vars(job)["_send"]


def send_after_order(channel: socket.socket, reply: Reply) -> None:
    """Send a reply once there is an order, and leave the order unread."""
    channel.recv(1, socket.MSG_PEEK)
    send(channel, reply)


def die(data: Bytes, limits: DecodingLimits) -> VideoFile:
    match bytes(data[:]).partition(b":"):
        case b"abort", _, _:
            os.abort()
        case b"spin", _, _:
            while True:
                pass
        case b"sleep", _, _:
            time.sleep(60)
        case b"memory", _, _:
            sys.stdout.write(str(len(bytearray(2**33))))
        case b"crash", _, _:
            os.kill(os.getpid(), signal.SIGSEGV)
        case b"killed", _, _:
            os.kill(os.getpid(), signal.SIGKILL)
        case b"costly", _, _:
            return CostlyVideo()
        case b"open", _, path:
            Path(path.decode()).open("rb").close()
    return open_video(data, limits)


def main(descriptor: int) -> None:
    vars(formats).update(open_video=die, open_audio=lambda *_: LateSound())
    vars(job)["DocumentFile"] = SleepingDocument
    spawner.main(descriptor)
