"""The spawner: a process without threads and secrets that forks a decoder process for each file.

It has imported the decoders, so that a decoder starts in a few milliseconds. It holds no bytes of
any file, so that a file that takes over its decoder cannot reach other files. The renderer starts
it by `exec`, because a fork of the renderer would copy the memory of other requests into every
decoder.
"""

import contextlib
import gc
import os
import select
import signal
import socket
from dataclasses import dataclass
from typing import NoReturn

from workers.renderer.decoding import job, sandbox
from workers.renderer.decoding.messages import MAX_MESSAGE_BYTES, Ended, decode_job, encode

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a decoder, and that the spawner ignores: it ends with the renderer."""
NUM_DESCRIPTORS = 3
"""Descriptors of a job: the socket on which its decoder answers, the file, the result's memory."""


@dataclass(frozen=True, slots=True)
class _Child:
    pid: int
    pidfd: int
    channel: socket.socket


def main(descriptor: int) -> None:
    """Fork decoders for jobs from a socket, until the socket is closed."""
    for number in _SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    null = os.open(os.devnull, os.O_RDWR)
    sandbox.isolate()
    gc.collect()
    gc.freeze()
    with socket.socket(fileno=descriptor) as control:
        _Spawner(control, null).serve()


class _Spawner:
    def __init__(self, control: socket.socket, null: int) -> None:
        self._control = control
        self._null = null
        self._poller = select.poll()
        self._poller.register(control, select.POLLIN)
        self._ending: dict[int, _Child] = {}
        """Running decoders by pidfd, which becomes readable when the decoder ends."""
        self._abandoned: dict[int, _Child] = {}
        """Running decoders by channel, which is watched for the close of the renderer's end."""

    def serve(self) -> None:
        while True:
            for descriptor, _ in self._poller.poll():
                if descriptor in self._ending:
                    self._reap(self._ending[descriptor])
                elif descriptor in self._abandoned:
                    # The renderer has closed its end, so the decoder's result is not needed.
                    signal.pidfd_send_signal(self._abandoned[descriptor].pidfd, signal.SIGKILL)
                    self._poller.unregister(descriptor)
                elif descriptor == self._control.fileno() and not self._start():
                    return

    def _start(self) -> bool:
        """Fork a decoder for the next job; return whether there may be further jobs."""
        message, descriptors, _, _ = socket.recv_fds(
            self._control, MAX_MESSAGE_BYTES, NUM_DESCRIPTORS
        )
        if not message:
            return False
        channel, source, target = descriptors
        with socket.socket(fileno=channel) as answers:
            try:
                self._fork(message, answers, source, target)
            except OSError:
                answers.send(encode(Ended(code=1)))
            finally:
                os.close(source)
                os.close(target)
        return True

    def _fork(self, message: bytes, channel: socket.socket, source: int, target: int) -> None:
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            self._decode(message, channel, source, target, parent)
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        child = _Child(pid, pidfd, channel.dup())
        self._ending[pidfd] = self._abandoned[child.channel.fileno()] = child
        self._poller.register(pidfd, select.POLLIN)
        self._poller.register(child.channel, 0)

    def _decode(
        self, message: bytes, channel: socket.socket, source: int, target: int, parent: int
    ) -> NoReturn:
        """Decode one file in the forked process, and exit."""
        code = 1
        try:
            self._control.close()
            for child in self._ending.values():
                child.channel.close()
                os.close(child.pidfd)
            for output in range(3):
                os.dup2(self._null, output)
            for number in _SIGNALS:
                signal.signal(number, signal.SIG_DFL)
            job.run(decode_job(message), channel, source, target, parent)
            code = 0
        finally:
            os._exit(code)

    def _reap(self, child: _Child) -> None:
        """Report the end of a decoder."""
        self._poller.unregister(child.pidfd)
        _, status, usage = os.wait4(child.pid, 0)
        del self._ending[child.pidfd]
        os.close(child.pidfd)
        if self._abandoned.pop(child.channel.fileno(), None) is not None:
            self._unwatch(child.channel)
        ended = Ended(os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime)
        # The renderer may have closed its end.
        with contextlib.suppress(OSError):
            child.channel.send(encode(ended), socket.MSG_DONTWAIT)
        child.channel.close()

    def _unwatch(self, channel: socket.socket) -> None:
        # A channel that the renderer has closed is not watched any more.
        with contextlib.suppress(KeyError):
            self._poller.unregister(channel)
