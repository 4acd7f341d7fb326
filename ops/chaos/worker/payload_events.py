"""Records the transports of a worker's large payloads, and the holders of their keys."""

import os
from collections.abc import Callable
from typing import Any

from ops.chaos.patching import wrap
from ops.chaos.worker.crash_points import CrashPoints
from shared.blobs.store import Blobs
from shared.blobs.transports import BusTransport, SharedMemoryTransport, TcpTransport
from shared.protocol.multimodal import BlobRef
from shared.stage.job import Job
from shared.stage.stage import Stage

Record = Callable[..., None]
LASTING = ("arena", "borrowed", "returned", "forwarded")
"""Events that matter for longer than one cell of the matrix."""


def watch(record: Record, crash: CrashPoints) -> None:
    """Wrap the methods of the payload store in this process."""
    _watch_reading(record, crash)
    _watch_keys(record)

    @wrap(Blobs, "start")
    async def start(original: Any, self: Blobs, *args: Any) -> None:
        await original(self, *args)
        record("arena", self.address.local)

    @wrap(Stage, "rerender")
    async def rerender(original: Any, self: Stage, job: Job, *args: Any) -> None:
        await original(self, job, *args)
        record("rerendered", job.request_id)


def _watch_reading(record: Record, crash: CrashPoints) -> None:
    @wrap(Blobs, "get")
    async def get(original: Any, self: Blobs, ref: BlobRef) -> Any:
        blob = await original(self, ref)
        if self._role == "engine":
            crash("mid_read")
        return blob

    for transport in (SharedMemoryTransport, TcpTransport, BusTransport):
        _watch_transport(transport, record)


def _watch_transport(transport: type, record: Record) -> None:
    @wrap(transport, "get")
    async def get(original: Any, self: Any, ref: BlobRef) -> Any:
        blob = await original(self, ref)
        record(f"read by {transport.__name__}", at=ref.num_bytes)
        return blob


def _watch_keys(record: Record) -> None:
    """Record the keys to other workers' payloads that this process holds.

    A key that its borrower has neither forwarded nor returned when it dies stays valid until it
    expires.
    """
    pid = os.getpid()
    borrowed: dict[bytes, str] = {}

    def end(key: bytes, how: str) -> None:
        if (name := borrowed.pop(key, None)) is not None:
            record(how, name, pid)

    @wrap(Blobs, "find")
    async def find(original: Any, self: Blobs, *args: Any) -> BlobRef | None:
        ref: BlobRef | None = await original(self, *args)
        if ref is not None and ref.worker != self._worker:
            borrowed[ref.key] = f"{ref.worker}:{ref.key.hex()[:8]}"
            record("borrowed", borrowed[ref.key], pid)
        return ref

    @wrap(Blobs, "release")
    async def release(original: Any, self: Blobs, ref: BlobRef) -> None:
        await original(self, ref)
        end(ref.key, "returned")

    @wrap(Stage, "forward")
    async def forward(
        original: Any, self: Stage, job: Job, *args: Any, detour: bool = False
    ) -> None:
        refs = list(job.outputs)
        try:
            await original(self, job, *args, detour=detour)
        finally:
            for ref in refs:
                if ref not in job.outputs:
                    end(ref.key, "forwarded")
