"""Decoding of one file from the renderer's side: a probe, then frames or samples in pieces."""

import contextlib
import math
import mmap
import os
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from typing import NoReturn, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import (
    InvalidMedia,
    MediaTooLarge,
    RequestError,
    UnsupportedContent,
    WorkerFailure,
)
from shared.helpers.forking import MAX_REPORT_BYTES, Ended, Forks, read_end, read_pid
from workers.renderer.decoding.messages import (
    MAX_MESSAGE_BYTES,
    MEDIA,
    NUM_SLOTS,
    PIECE_SAMPLES,
    AudioProbe,
    DocumentProbe,
    Done,
    Job,
    Kind,
    Order,
    Piece,
    Probe,
    Proceed,
    ReadFrames,
    ReadPages,
    ReadSamples,
    ReadTexts,
    Refused,
    Reply,
    VideoProbe,
    decode_reply,
    encode,
)
from workers.renderer.decoding.shared_memory import make_source, make_target

MAX_WAIT_S = 60.0
"""Longest silence of a decoder before it is abandoned. The kernel limits its processor time."""
MAX_KILLED = 3
"""Number of decoders of one file that were killed from outside after which its request fails."""
_NOT_BY_ITSELF = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)


class ExceedsLimits(InvalidMedia):
    """Raised for a file that crashed its decoder, or exceeded a limit on the decoder process."""


Value = TypeVar("Value", np.uint8, np.float32)
_PROBES: dict[Kind, type[Probe]] = {
    "frames": VideoProbe,
    "samples": AudioProbe,
    "pages": DocumentProbe,
}
_ERRORS: dict[str, type[RequestError]] = {
    "invalid": InvalidMedia,
    "exceeded": ExceedsLimits,
    "too_large": MediaTooLarge,
    "unsupported": UnsupportedContent,
}


class _Killed(Exception):
    """The decoder was killed from outside."""


class Decoding:
    """A file and its decoder, as a context manager for one thread. Its methods block.

    All methods raise a RequestError for a file that is refused, and WorkerFailure.
    """

    def __init__(self, forks: Forks, job: Job, data: bytes, field: str) -> None:
        self._forks = forks
        self._job = job
        self._field = field
        self._medium = MEDIA[job.kind]
        self._num_killed = 0
        self._channel: socket.socket | None = None
        self._report: socket.socket | None = None
        self._probe: Probe | None = None
        slot_bytes = {
            "frames": job.limits.max_pixels * 3,
            "samples": PIECE_SAMPLES * 4,
            "pages": job.limits.max_page_pixels * 3,
        }[job.kind]
        with contextlib.ExitStack() as undo:
            self._source = make_source(data)
            undo.callback(os.close, self._source)
            self._target = make_target(NUM_SLOTS * slot_bytes)
            undo.callback(os.close, self._target)
            # The mapping is never written here, but torch warns about read-only memory.
            self._memory = mmap.mmap(self._target, 0)
            self._undo = undo.pop_all()

    def __enter__(self) -> "Decoding":
        return self

    def __exit__(self, *_: object) -> None:
        self._hang_up()
        self._undo.close()
        try:
            self._memory.close()
        except BufferError:
            # The traceback of an error references a frame until it is collected. The pages of the
            # frame, which may be many, are freed now.
            with contextlib.suppress(OSError):
                self._memory.madvise(mmap.MADV_REMOVE)

    @property
    def is_probed(self) -> bool:
        return self._probe is not None

    def probe_video(self) -> VideoProbe:
        probe = self._get_probe()
        assert isinstance(probe, VideoProbe)
        return probe

    def probe_audio(self) -> AudioProbe:
        probe = self._get_probe()
        assert isinstance(probe, AudioProbe)
        return probe

    def probe_document(self) -> DocumentProbe:
        probe = self._get_probe()
        assert isinstance(probe, DocumentProbe)
        return probe

    def read_frames(self, indexes: Sequence[int]) -> Iterator[NDArray[np.uint8]]:
        """Yield the frame of each index, [height, width, 3], valid until the next frame.

        The indexes must be ascending and may repeat.
        """
        probe = self.probe_video()
        shape = (probe.height, probe.width, 3)
        distinct = list(dict.fromkeys(indexes))
        pieces = self._read(lambda num_read: ReadFrames(distinct[num_read:]), np.uint8)
        frame: NDArray[np.uint8] | None = None
        read = -1
        for index in indexes:
            if index != read:
                frame, read = next(pieces, None), index
            if frame is None or frame.shape != shape:
                raise self._incomplete()
            yield frame

    def read_samples(self, rate: int) -> Iterator[NDArray[np.float32]]:
        """Yield the samples in pieces: the mean of all channels at `rate` samples a second."""
        for piece in self._read(lambda num_read: ReadSamples(rate, num_read), np.float32):
            yield piece.flatten()

    def read_pages(self, numbers: list[int], dpi: int) -> Iterator[NDArray[np.uint8]]:
        """Yield the image of each page, [height, width, 3], valid until the next image."""
        for image in self._read(lambda num_read: ReadPages(numbers[num_read:], dpi), np.uint8):
            if image.shape[2:] != (3,) or not image.size:
                raise self._incomplete()
            yield image

    def read_texts(self, numbers: list[int]) -> Iterator[str]:
        """Yield the text of each page."""
        for text in self._read(lambda num_read: ReadTexts(numbers[num_read:]), np.uint8):
            yield text.tobytes().decode(errors="replace")

    def _get_probe(self) -> Probe:
        while self._probe is None:
            with self._replacing():
                self._start()
        return self._probe

    def _read(self, order: Callable[[int], Order], dtype: type[Value]) -> Iterator[NDArray[Value]]:
        """Yield all pieces. `order` is called with the number of pieces that are already read."""
        self._get_probe()
        num_read, is_done = 0, False
        while not is_done:
            with self._replacing():
                if self._channel is None:
                    self._start()
                self._send(order(num_read))
                slot = 0
                while isinstance(reply := self._receive(), Piece):
                    yield self._view(slot, reply.shape, dtype)
                    num_read += 1
                    slot = (slot + 1) % NUM_SLOTS
                    self._send(Proceed())
                is_done = True
        if not isinstance(reply, Done):
            raise self._incomplete()

    @contextlib.contextmanager
    def _replacing(self) -> Iterator[None]:
        """Suppress the end of a killed decoder, so that the caller can retry with a new decoder."""
        try:
            yield
        except _Killed:
            self._hang_up()
            self._num_killed += 1
            if self._num_killed == MAX_KILLED:
                raise WorkerFailure(
                    f"{MAX_KILLED} processes that decoded the {self._medium} were killed"
                ) from None

    def _start(self) -> None:
        """Start a decoder, and receive its probe."""
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(MAX_WAIT_S)
        with theirs:
            descriptors = [theirs.fileno(), self._source, self._target]
            try:
                self._report = self._forks.fork(encode(self._job), descriptors)
            except OSError as error:
                raise WorkerFailure("a process to decode media could not be started") from error
        self._report.settimeout(MAX_WAIT_S)
        reply = self._receive()
        kind = _PROBES[self._job.kind]
        if not isinstance(reply, kind) or self._probe not in (None, reply):
            raise self._incomplete()
        self._probe = reply

    def _hang_up(self) -> None:
        for each in (self._channel, self._report):
            if each is not None:
                each.close()
        self._channel = self._report = None

    def _view(self, slot: int, shape: list[int], dtype: type[Value]) -> NDArray[Value]:
        slot_bytes, num_values = len(self._memory) // NUM_SLOTS, math.prod(shape)
        if num_values * np.dtype(dtype).itemsize > slot_bytes:
            raise self._incomplete()
        view = np.frombuffer(self._memory, dtype, num_values, slot * slot_bytes)
        return view.reshape(shape)

    def _send(self, order: Order) -> None:
        assert self._channel is not None
        # A decoder that has ended has sent its reason, or its end is received next.
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self._channel.send(encode(order))

    def _receive(self) -> Reply:
        """Return the next reply. Raises the error of a refusal, and _Killed."""
        assert self._channel is not None
        try:
            try:
                message = self._channel.recv(MAX_MESSAGE_BYTES)
            except ConnectionResetError:
                # The decoder ended with an order unread. Linux reports this once, before the
                # replies that the decoder had sent.
                message = self._channel.recv(MAX_MESSAGE_BYTES)
            if not message:
                self._explain(self._receive_end())
        except TimeoutError:
            raise WorkerFailure(
                f"a process that decodes the {self._medium} was silent for {MAX_WAIT_S:g} s"
            ) from None
        try:
            reply = decode_reply(message)
        except msgspec.DecodeError:
            raise self._incomplete() from None
        if isinstance(reply, Refused):
            raise _ERRORS[reply.fault](reply.message, field=self._field)
        return reply

    def _receive_end(self) -> Ended:
        """Return how the decoder has ended. Raises _Killed if it or the spawner does not exist."""
        assert self._report is not None
        try:
            read_pid(self._report.recv(MAX_REPORT_BYTES))
            return read_end(self._report.recv(MAX_REPORT_BYTES))
        except TimeoutError:
            raise
        except OSError:
            raise _Killed from None

    def _explain(self, ended: Ended) -> NoReturn:
        """Raise the error of a decoder that has ended without a reply."""
        limits, number = self._job.limits, -ended.code
        is_over = number == signal.SIGXCPU or ended.cpu_s >= limits.max_cpu_s
        if not is_over and (number <= 0 or number in _NOT_BY_ITSELF):
            raise _Killed
        cause = (
            f"{limits.max_cpu_s} s of processor time"
            if is_over
            else f"its decoder ended by signal {number}, with limits of {limits.max_memory_mib} MiB"
            f" and {limits.max_cpu_s} s"
        )
        raise ExceedsLimits(
            f"the {self._medium} could not be decoded within its limits: {cause}",
            field=self._field,
        )

    def _incomplete(self) -> InvalidMedia:
        return InvalidMedia(f"the {self._medium} is damaged or incomplete", field=self._field)
