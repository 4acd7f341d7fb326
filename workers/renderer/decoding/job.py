"""One job in a decoder process: probe a file, report the probe, and read the requested parts."""

import itertools
import mmap
import os
import socket
from collections.abc import Iterable, Iterator

import numpy as np
from numpy.typing import NDArray

from shared.decoding.refusal import Refusal
from shared.helpers.sandbox import confine
from workers.renderer.decoding import audio_file, formats
from workers.renderer.decoding.document_file import DocumentFile
from workers.renderer.decoding.messages import (
    MAX_MESSAGE_BYTES,
    MEDIA,
    NUM_SLOTS,
    Done,
    Job,
    Piece,
    ReadFrames,
    ReadPages,
    ReadSamples,
    ReadTexts,
    Refused,
    Reply,
    decode_order,
    encode,
)
from workers.renderer.decoding.video_file import Pixels, VideoFile

# The renderer's other requests have priority.
NICENESS = 10

_Samples = NDArray[np.float32]


def run(job: Job, channel: socket.socket, source: int, target: int) -> None:
    """Do a job within the limits of the sandbox."""
    medium = MEDIA[job.kind]
    try:
        data = mmap.mmap(source, 0, access=mmap.ACCESS_READ)
        slots = memoryview(mmap.mmap(target, 0))
        confine(job.limits.max_cpu_s, job.limits.max_memory_mib * 2**20, NICENESS)
        if job.kind == "frames":
            _serve_video(job, channel, data, slots)
        elif job.kind == "pages":
            _serve_document(job, channel, data, slots)
        else:
            _serve_audio(job, channel, source, data, slots)
    except Refusal as refusal:
        _send(channel, Refused(refusal.fault, str(refusal)))
    except MemoryError:
        limit = job.limits.max_memory_mib
        message = f"the {medium} could not be decoded within its limits: {limit} MiB of memory"
        _send(channel, Refused("exceeded", message))
    except Exception:  # The decoders raise nearly every type on hostile bytes.
        _send(channel, Refused("invalid", f"the {medium} is damaged or incomplete"))


def _serve_video(job: Job, channel: socket.socket, data: mmap.mmap, slots: memoryview) -> None:
    video = formats.open_video(data, job.limits)
    _send(channel, video.probe)
    order = _receive(channel)
    if isinstance(order, ReadFrames):
        _write(channel, slots, _frames(video, order.indexes))


def _frames(video: VideoFile, indexes: list[int]) -> Iterator[Pixels]:
    probe = video.probe
    for frame in video.frames(indexes):
        assert frame.shape == (probe.height, probe.width, 3)
        yield frame


def _serve_audio(
    job: Job, channel: socket.socket, source: int, data: mmap.mmap, slots: memoryview
) -> None:
    file = formats.open_audio(data, source, job.limits)
    _send(channel, file.probe)
    order = _receive(channel)
    if isinstance(order, ReadSamples):
        pieces = audio_file.read_mono(file, order.rate, job.limits)
        pieces = itertools.islice(pieces, order.num_skipped, None)
        _write(channel, slots, pieces)


def _serve_document(job: Job, channel: socket.socket, data: mmap.mmap, slots: memoryview) -> None:
    document = DocumentFile(data, job.limits)
    _send(channel, document.probe)
    order = _receive(channel)
    if isinstance(order, ReadPages):
        _write(channel, slots, document.images(order.numbers, order.dpi))
    elif isinstance(order, ReadTexts):
        texts = document.texts(order.numbers)
        _write(channel, slots, (np.frombuffer(text.encode(), np.uint8) for text in texts))


def _write(channel: socket.socket, slots: memoryview, pieces: Iterable[Pixels | _Samples]) -> None:
    """Write pieces to the slots in turn. A slot is only overwritten after the renderer read it."""
    slot_bytes = len(slots) // NUM_SLOTS
    for number, values in enumerate(pieces):
        if number >= NUM_SLOTS:
            _receive(channel)
        begin = number % NUM_SLOTS * slot_bytes
        target = np.frombuffer(slots[begin : begin + values.nbytes], values.dtype)
        target.reshape(values.shape)[...] = values
        _send(channel, Piece(list(values.shape)))
    _send(channel, Done())


def _receive(channel: socket.socket) -> object:
    """Return the next order. Exits if the renderer has ended or closed the channel."""
    message = channel.recv(MAX_MESSAGE_BYTES)
    if not message:
        os._exit(0)
    return decode_order(message)


def _send(channel: socket.socket, reply: Reply) -> None:
    try:
        channel.send(encode(reply))
    except BrokenPipeError:
        os._exit(0)
