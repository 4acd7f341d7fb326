"""KV blocks as blobs: a prefill worker stores the blocks of a prompt, and an engine reads them.

The blocks are a cache. An engine that cannot read them in time, or finds them damaged or in another
layout, computes the prompt itself and does not request the blocks again.
"""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from blake3 import blake3

from shared.blobs.store import Blobs
from shared.config.schema import ModelConfig
from shared.errors import BlobLost, PagemillError
from shared.helpers.task_set import TaskSet
from shared.models.digest import digest_of_files
from shared.protocol.multimodal import BlobRef, HashPart, content_hash
from shared.protocol.task_messages import KVBlob
from workers.engine.core.kv_exchange import KVExchange
from workers.engine.core.sequence import EngineRequest, KVRun, ReceivedKV
from workers.engine.item_loader import close_soon

RUN_BYTES = 16 * 2**20
"""Size of a blob: small enough to copy into the arena without a noticeable pause."""
FIRST_BYTE_S = 2.0
"""Time allowed for the first byte. A prefill worker that does not answer by then may be dead."""
MIN_BYTES_PER_S = 2**30
"""Lowest accepted rate. Below it, computing the blocks is usually faster."""
FORMAT = 1
"""Version of the bytes in a blob. Raise it when a change of a kernel or of the runner changes the
order or the meaning of a block's bytes; engines of other versions then compute their prompts."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Names of blocks, derived from all properties that exchanging engines must have in common."""

    parts: Sequence[HashPart]
    adapters: Mapping[str | None, str]
    """Digests of the adapters' files; the key None is for requests without an adapter."""

    @classmethod
    def of(cls, model: ModelConfig, layout: list[HashPart]) -> "KVLayout":
        """Read the files of a model and its adapters; `layout` is the layout of the KV cache.

        The names of files say nothing about the weights in them, so all bytes are read.
        """
        parts = [digest_of_files(Path(model.path)), model.quantization or "", layout]
        digests: dict[str | None, str] = {None: ""}
        for name, path in model.adapters.items():
            digests[name] = digest_of_files(Path(path))
        return cls(parts, digests)

    def name_of(self, adapter: str | None, hashes: Sequence[str]) -> str:
        """Return the name of a blob that holds the blocks with these hashes."""
        return content_hash("kv", FORMAT, self.parts, self.adapters.get(adapter, ""), hashes)


async def store(
    blobs: Blobs,
    layout: KVLayout,
    adapter: str | None,
    runs: Sequence[KVRun],
    ttl_s: float,
    refs: list[BlobRef],
) -> list[KVBlob]:
    """Store blocks until the arena is full. Each reference is added to `refs` at once."""
    stored: list[KVBlob] = []
    for run in runs:
        name = layout.name_of(adapter, run.hashes)
        ref = blobs.put(name, run.data, ttl_s)
        if ref is None:
            _log.warning("kv_not_stored", blobs=len(stored), of=len(runs))
            break
        refs.append(ref)
        # The stored bytes are hashed, not `run`: a blob of this name may exist already, from
        # another batch, and its keys and values may differ in their last bits.
        with await blobs.get(ref) as blob:
            digest = await asyncio.to_thread(_digest, blob.data)
        stored.append(KVBlob(ref, name, run.first, len(run.hashes), digest))
    return stored


class KVReader:
    """Reads the blocks of prompts that prefill workers have computed."""

    def __init__(self, blobs: Blobs, layout: KVLayout, exchange: KVExchange) -> None:
        self._blobs = blobs
        self._layout = layout
        self._exchange = exchange
        self._acknowledging = TaskSet()

    async def read(self, request: EngineRequest, kv: Sequence[KVBlob]) -> ReceivedKV:
        """Return the blocks that this engine has not cached, up to the first unreadable one."""
        hashes = await asyncio.to_thread(self._exchange.prompt_hashes, request)
        readable, reason = self._check(request.adapter, hashes, kv)
        num_cached = self._exchange.num_cached(hashes)
        missing = [blocks for blocks in readable if blocks.first + blocks.num_blocks > num_cached]
        num_bytes = sum(blocks.ref.num_bytes for blocks in missing)
        runs: list[KVRun] = []
        error: Exception | None = None
        try:
            async with asyncio.timeout(FIRST_BYTE_S + num_bytes / MIN_BYTES_PER_S):
                for blocks in missing:
                    stop = blocks.first + blocks.num_blocks
                    runs.append(await self._read_run(blocks, hashes[blocks.first : stop]))
                    # The owner may reuse its memory while this engine decodes.
                    self._acknowledging.start(self._blobs.acknowledge(blocks.ref))
        except TimeoutError:
            reason = "too late"
        except PagemillError as lost:
            reason = lost.message
        except Exception as unexpected:
            # The references come from another worker. No request fails because of a cache.
            reason, error = "unexpected", unexpected
        if reason:
            _log.warning(
                "kv_not_read", request_id=request.request_id, reason=reason, exc_info=error
            )
        return ReceivedKV(runs)

    def _check(
        self, adapter: str | None, hashes: Sequence[str], kv: Sequence[KVBlob]
    ) -> tuple[Sequence[KVBlob], str]:
        """Return the blobs that can hold the prompt's blocks, one after another from the first.

        The second value is the fault of the next blob, if there is one.
        """
        end = 0
        for number, blocks in enumerate(kv):
            stop = blocks.first + blocks.num_blocks
            if blocks.name != self._layout.name_of(adapter, hashes[blocks.first : stop]):
                return kv[:number], "another layout"
            if blocks.first != end or not end < stop <= len(hashes):
                reason = f"blocks {blocks.first} to {stop} after {end} of {len(hashes)}"
                return kv[:number], reason
            num_bytes = blocks.num_blocks * self._exchange.block_bytes
            if blocks.ref.num_bytes != num_bytes:
                reason = f"{blocks.ref.num_bytes} bytes for blocks of {num_bytes} bytes"
                return kv[:number], reason
            end = stop
        return kv, ""

    async def _read_run(self, blocks: KVBlob, hashes: list[str]) -> KVRun:
        blob = await self._blobs.get(blocks.ref)
        try:
            if blob.data.nbytes != blocks.ref.num_bytes:
                raise BlobLost(f"{blob.data.nbytes} bytes, expected {blocks.ref.num_bytes}")
            if await asyncio.to_thread(_digest, blob.data) != blocks.digest:
                raise BlobLost("damaged")
            run = KVRun(blocks.first, hashes, (blob.data,))
        except BaseException:
            blob.close()
            raise
        # The step thread copies the blocks later, and drops the run.
        loop = asyncio.get_running_loop()
        weakref.finalize(run, close_soon, loop, blob.close).atexit = False
        return run


def _digest(data: memoryview) -> bytes:
    return blake3(data).digest()
