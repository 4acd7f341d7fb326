"""KV blocks as blobs: a prefill worker stores those of a prompt, and an engine reads them.

The blocks are a cache. An engine that cannot read them in time, or finds them damaged or of another
layout, computes the prompt itself, and asks nobody for them again.
"""

import asyncio
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import structlog
from blake3 import blake3

from shared.blobs.store import Blobs
from shared.config import ModelConfig
from shared.errors import BlobLost, PagemillError
from shared.protocol.multimodal import BlobRef, HashPart, content_hash
from shared.protocol.task_messages import KVBlob
from shared.task_set import TaskSet
from workers.engine.core.kv_exchange import KVExchange
from workers.engine.core.sequence import EngineRequest, KVRun, ReceivedKV
from workers.engine.item_loader import close_soon

RUN_BYTES = 16 * 2**20
"""Size of a blob: small enough to copy into the arena without a pause that others would feel."""
FIRST_BYTE_S = 2.0
"""A prefill worker that does not answer for so long may be dead."""
MIN_BYTES_PER_S = 2**30
"""Below this rate it is mostly faster to compute the blocks."""

_log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Names of blocks, over everything that engines must agree in to exchange them."""

    _parts: Sequence[HashPart]
    _adapters: Mapping[str | None, str]
    """Digests of the adapters' files; None stands for no adapter."""

    @classmethod
    def of(cls, model: ModelConfig, layout: list[HashPart]) -> "KVLayout":
        """Read the files of a model and its adapters; `layout` is that of the KV cache.

        The names of files say nothing about the weights in them, so all bytes are read.
        """
        parts = [digest_of_files(Path(model.path)), model.quantization or "", layout]
        digests: dict[str | None, str] = {None: ""}
        for name, path in model.adapters.items():
            digests[name] = digest_of_files(Path(path))
        return cls(parts, digests)

    def name_of(self, adapter: str | None, hashes: Sequence[str]) -> str:
        """Return the name of a blob that holds the blocks with these hashes."""
        return content_hash("kv", self._parts, self._adapters.get(adapter, ""), hashes)


def digest_of_files(folder: Path) -> str:
    """Return a hash over the configuration and the weights in a folder."""
    digest = blake3(max_threads=blake3.AUTO)
    for file in sorted([*folder.glob("*.json"), *folder.glob("*.safetensors")]):
        digest.update(content_hash(file.name, file.stat().st_size).encode())
        digest.update_mmap(file)
    return digest.hexdigest()


async def store(
    blobs: Blobs,
    layout: KVLayout,
    adapter: str | None,
    runs: Sequence[KVRun],
    ttl_s: float,
    made: list[BlobRef],
) -> list[KVBlob]:
    """Store blocks, as many as there is room for. References are added to `made` at once."""
    stored: list[KVBlob] = []
    for run in runs:
        name = layout.name_of(adapter, run.hashes)
        ref = blobs.put(name, run.data, ttl_s)
        if ref is None:
            _log.warning("kv_not_stored", blobs=len(stored), of=len(runs))
            break
        made.append(ref)
        # The digest is that of the stored bytes, not of `run`: a blob of this name may have been
        # there before, from another batch, whose keys and values differ in their last bits.
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
        num_cached = self._exchange.num_cached(hashes)
        missing = [blocks for blocks in kv if blocks.first + blocks.num_blocks > num_cached]
        num_bytes = sum(blocks.ref.num_bytes for blocks in missing)
        runs: list[KVRun] = []
        reason = ""
        try:
            async with asyncio.timeout(FIRST_BYTE_S + num_bytes / MIN_BYTES_PER_S):
                for blocks in missing:
                    stop = blocks.first + blocks.num_blocks
                    run_hashes = hashes[blocks.first : stop]
                    if blocks.name != self._layout.name_of(request.adapter, run_hashes):
                        reason = "another layout"
                        break
                    runs.append(await self._read_run(blocks, run_hashes))
                    # The owner may reuse its memory while this engine decodes.
                    self._acknowledging.start(self._blobs.acknowledge(blocks.ref))
        except TimeoutError:
            reason = "too late"
        except PagemillError as error:
            reason = error.message
        if reason:
            _log.warning("kv_not_read", request_id=request.request_id, reason=reason)
        return ReceivedKV(runs)

    async def _read_run(self, blocks: KVBlob, hashes: list[str]) -> KVRun:
        blob = await self._blobs.get(blocks.ref)
        try:
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
