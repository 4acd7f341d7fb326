"""Watches a worker's large payloads: who reads them on which road, and who has a key to them."""

import os
from collections.abc import Callable
from typing import Any

from ops.chaos.worker.crash_points import CrashPoints
from ops.chaos.worker.wrap import wrap
from shared.blobs.store import Blobs
from shared.blobs.transports import BusTransport, SharedMemoryTransport, TcpTransport
from shared.protocol.multimodal import BlobRef
from shared.stage.stage import Stage

Tell = Callable[..., None]
LASTING = ("arena", "borrowed", "returned", "passed on")
"""What is of interest for longer than one cell of the matrix."""


def watch(tell: Tell, crash: CrashPoints) -> None:
    _watch_reading(tell, crash)
    _watch_keys(tell)

    @wrap(Blobs, "start")
    async def start(original: Any, self: Blobs) -> None:
        await original(self)
        tell("arena", self.address.local)

    @wrap(Stage, "rerender")
    async def rerender(original: Any, self: Stage, job: Any, *args: Any) -> None:
        await original(self, job, *args)
        tell("sent back", job.request_id)


def _watch_reading(tell: Tell, crash: CrashPoints) -> None:
    @wrap(Blobs, "get")
    async def get(original: Any, self: Blobs, ref: BlobRef) -> Any:
        blob = await original(self, ref)
        if self._role == "engine":
            crash("mid_read")
        return blob

    for road in (SharedMemoryTransport, TcpTransport, BusTransport):
        _watch_road(road, tell)


def _watch_road(road: type, tell: Tell) -> None:
    @wrap(road, "get")
    async def get(original: Any, self: Any, ref: BlobRef) -> Any:
        blob = await original(self, ref)
        tell(f"read by {road.__name__}", at=ref.num_bytes)
        return blob


def _watch_keys(tell: Tell) -> None:
    """A key to another's payload lasts until its time is over if whoever has asked for it dies
    before he has passed it on or given it back."""
    pid = os.getpid()
    borrowed: dict[bytes, str] = {}

    def let_go(key: bytes, how: str) -> None:
        if (name := borrowed.pop(key, None)) is not None:
            tell(how, name, pid)

    @wrap(Blobs, "find")
    async def find(original: Any, self: Blobs, *args: Any) -> BlobRef | None:
        ref: BlobRef | None = await original(self, *args)
        if ref is not None and ref.worker != self._worker:
            borrowed[ref.key] = f"{ref.worker}:{ref.key.hex()[:8]}"
            tell("borrowed", borrowed[ref.key], pid)
        return ref

    @wrap(Blobs, "release")
    async def release(original: Any, self: Blobs, ref: BlobRef) -> None:
        await original(self, ref)
        let_go(ref.key, "returned")

    @wrap(Stage, "publish")
    async def publish(original: Any, self: Stage, job: Any, *args: Any) -> None:
        refs = list(job.outputs)
        await original(self, job, *args)
        for ref in refs:
            if ref not in job.outputs:
                let_go(ref.key, "passed on")
