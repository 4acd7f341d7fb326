"""KV blocks over blobs: read whole, or not at all; and their owner's memory is given back."""

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from blake3 import blake3

from shared.blobs.store import Blobs
from shared.blobs.transports import Blob
from shared.bus.bus import Bus
from shared.config.schema import BlobsConfig, ModelConfig
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.multimodal import BlobRef
from shared.protocol.task_messages import KVBlob
from tests.engine.core.test_kv_exchange import Engine, prefilled, request_of
from tests.fakes import CONTENT_BYTES
from workers.engine import kv_transfer
from workers.engine.core.sequence import EngineRequest
from workers.engine.kv_transfer import KVLayout, KVReader

LAYOUT = KVLayout(["model"], {None: "", "a": "adapter"})


@pytest.fixture
async def pair(bus: Bus) -> AsyncIterator[tuple[Blobs, Blobs]]:
    """The blobs of a prefill worker, and of an engine on the same machine."""
    both = []
    for role in ("prefill", "engine"):
        worker = f"{role}-{secrets.token_hex(4)}"
        blobs = Blobs(bus, role, worker, BlobsConfig(arena_mib=1))
        await blobs.start()
        beat = Heartbeat(role, worker, "0", 0, [], {}, blobs.address)
        await bus.heartbeats.publish(worker, to_json(beat))
        both.append(blobs)
    yield both[0], both[1]
    for blobs in both:
        await blobs.close()


async def stored(owner: Blobs, request: EngineRequest) -> list[KVBlob]:
    refs: list[BlobRef] = []
    kv = await kv_transfer.store(owner, LAYOUT, request.adapter, prefilled(request), 60, refs)
    assert [blocks.ref for blocks in kv] == refs
    return kv


async def num_read(
    reader: Blobs, request: EngineRequest, kv: list[KVBlob], layout: KVLayout = LAYOUT
) -> int:
    """Read the blocks, have an engine answer, and return the tokens that it did not compute."""
    engine = Engine(seed=5)
    received = await KVReader(reader, layout, engine.core.kv_exchange).read(request, kv)
    num_computed = engine.num_prefilled(replace(request, received=received))
    return len(request.prompt_token_ids) - num_computed


async def until_unpinned(owner: Blobs) -> None:
    async with asyncio.timeout(5):
        while owner.num_pinned:
            gc.collect()
            await asyncio.sleep(0.01)


async def test_blocks_are_read_and_their_memory_is_given_back(pair: tuple[Blobs, Blobs]) -> None:
    owner, reader = pair
    request = request_of()
    kv = await stored(owner, request)
    assert owner.num_pinned == len(kv) == 4
    assert await num_read(reader, request, kv) == 20
    await until_unpinned(owner)
    # Still there for an engine that takes the request over.
    assert await num_read(reader, request, kv) == 20
    for blocks in kv:
        await reader.release(blocks.ref)
    assert await num_read(reader, request, kv) == 0


async def test_only_blocks_that_are_not_cached_are_read(pair: tuple[Blobs, Blobs]) -> None:
    owner, reader = pair
    request, engine = request_of(), Engine()
    kv = await stored(owner, request)
    engine.run(replace(request, request_id="b", prompt_token_ids=request.prompt_token_ids[:15]))
    received = await KVReader(reader, LAYOUT, engine.core.kv_exchange).read(request, kv)
    # Seven blocks are cached, so the first two runs of three are not needed.
    assert [run.first for run in received.runs] == [6, 9]
    engine.run(request)
    received = await KVReader(reader, LAYOUT, engine.core.kv_exchange).read(request, kv)
    assert received.runs == []


async def test_a_damaged_blob_and_later_blobs_are_not_used(pair: tuple[Blobs, Blobs]) -> None:
    owner, reader = pair
    request = request_of()
    kv = await stored(owner, request)
    server = owner._server
    slot = server.open(kv[1].ref.key, "test")
    assert slot is not None
    server.arena._view[slot.offset + 5] ^= 1
    assert await num_read(reader, request, kv) == 6


@pytest.mark.parametrize(
    "layout", [KVLayout(["other"], {None: ""}), KVLayout(["model", 8], {None: ""})]
)
async def test_blocks_of_another_layout_are_not_read(
    pair: tuple[Blobs, Blobs], layout: KVLayout
) -> None:
    owner, reader = pair
    request = request_of()
    assert await num_read(reader, request, await stored(owner, request), layout) == 0


async def test_blocks_of_another_version_of_the_format_are_not_read(
    pair: tuple[Blobs, Blobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    request = request_of()
    kv = await stored(owner, request)
    monkeypatch.setattr(kv_transfer, "FORMAT", kv_transfer.FORMAT + 1)
    assert await num_read(reader, request, kv) == 0


def repeated(kv: list[KVBlob]) -> list[KVBlob]:
    return [kv[0], kv[1], kv[1], kv[2]]


def in_another_order(kv: list[KVBlob]) -> list[KVBlob]:
    return [kv[0], kv[2], kv[1]]


def without_the_second(kv: list[KVBlob]) -> list[KVBlob]:
    return [kv[0], *kv[2:]]


def renamed(blocks: KVBlob, first: int, num_blocks: int) -> KVBlob:
    """A blob of these blocks, with the name that an engine expects for them."""
    hashes = Engine().core.kv_exchange.prompt_hashes(request_of())
    name = LAYOUT.name_of(None, hashes[first : first + num_blocks])
    return msgspec.structs.replace(blocks, first=first, num_blocks=num_blocks, name=name)


FOREIGN: list[tuple[Callable[[list[KVBlob]], list[KVBlob]], int]] = [
    (repeated, 12),
    (in_another_order, 6),
    (without_the_second, 6),
    # Ranges that end after the prompt, before they begin, or where they begin.
    (lambda kv: [*kv[:3], renamed(kv[3], 9, 100)], 18),
    (lambda kv: [kv[0], renamed(kv[1], 3, -3)], 6),
    (lambda kv: [kv[0], renamed(kv[1], 3, 0), *kv[1:]], 6),
    (lambda kv: [renamed(kv[0], -7, 3)], 0),
    # More and fewer blocks than the blob has bytes for.
    (lambda kv: [renamed(kv[0], 0, 4)], 0),
    (lambda kv: [renamed(kv[0], 0, 2)], 0),
    # References that name no blob.
    (lambda kv: [kv[0], with_ref(kv[1], key=b"short")], 6),
    (lambda kv: [kv[0], with_ref(kv[1], worker="no name.")], 6),
    (lambda kv: [kv[0], with_ref(kv[1], num_bytes=2**80)], 6),
    (lambda kv: [kv[0], with_ref(kv[1], num_bytes=-1)], 6),
]


def with_ref(blocks: KVBlob, **changes: Any) -> KVBlob:
    return msgspec.structs.replace(blocks, ref=msgspec.structs.replace(blocks.ref, **changes))


@pytest.mark.parametrize(("change", "num_tokens"), FOREIGN)
async def test_blobs_that_do_not_fit_the_prompt_are_not_read(
    pair: tuple[Blobs, Blobs],
    change: Callable[[list[KVBlob]], list[KVBlob]],
    num_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only the blobs before the first such blob are used, and the log has the reason."""
    owner, reader = pair
    request, read, get = request_of(), list[int](), reader.get
    kv = change(await stored(owner, request))

    async def get_counted(ref: BlobRef) -> Blob:
        blob = await get(ref)
        read.append(blob.data.nbytes)
        return blob

    monkeypatch.setattr(reader, "get", get_counted)
    with structlog.testing.capture_logs() as logs:
        assert await num_read(reader, request, kv) == num_tokens
    assert [line["event"] for line in logs if line["event"] == "kv_not_read"] == ["kv_not_read"]
    # A token takes the same bytes everywhere, and none is transferred in vain.
    assert sum(read) == num_tokens * CONTENT_BYTES


@pytest.mark.parametrize("num_bytes", [0, 5, 191])
async def test_a_truncated_blob_and_later_blobs_are_not_used(
    pair: tuple[Blobs, Blobs], monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    """Its owner has cut it, and names the digest of what is left."""
    owner, reader = pair
    request, get = request_of(), reader.get
    kv = await stored(owner, request)

    async def get_part(ref: BlobRef) -> Blob:
        blob = await get(ref)
        return blob if ref != kv[1].ref else Blob(blob.data[:num_bytes], blob.close)

    with await get_part(kv[1].ref) as blob:
        kv[1] = msgspec.structs.replace(kv[1], digest=blake3(blob.data).digest())
    monkeypatch.setattr(reader, "get", get_part)
    with structlog.testing.capture_logs() as logs:
        assert await num_read(reader, request, kv) == 6
    assert "kv_not_read" in [line["event"] for line in logs]


async def test_blocks_of_another_adapter_are_not_read(pair: tuple[Blobs, Blobs]) -> None:
    """The engine's adapter of this name has other weights."""
    owner, reader = pair
    request = replace(request_of(), adapter="a")
    kv = await stored(owner, request)
    assert await num_read(reader, request, kv, KVLayout(["model"], {None: "", "a": "b"})) == 0
    assert await num_read(reader, request, kv) == 20


async def test_blocks_of_a_dead_owner_are_not_read(pair: tuple[Blobs, Blobs]) -> None:
    owner, reader = pair
    request = request_of()
    kv = await stored(owner, request)
    await owner.close()
    assert await num_read(reader, request, kv) == 0


async def test_late_blocks_are_not_waited_for(
    pair: tuple[Blobs, Blobs], monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, reader = pair
    request = request_of()
    kv = await stored(owner, request)
    get = reader.get

    async def get_late(ref: BlobRef) -> Blob:
        if ref == kv[2].ref:
            await asyncio.Event().wait()
        return await get(ref)

    monkeypatch.setattr(reader, "get", get_late)
    monkeypatch.setattr(kv_transfer, "FIRST_BYTE_S", 0.5)
    # The two blobs before it are used.
    assert await num_read(reader, request, kv) == 12


async def test_blocks_without_room_are_not_stored(bus: Bus) -> None:
    owner = Blobs(bus, "prefill", f"prefill-{secrets.token_hex(4)}", BlobsConfig(arena_mib=1))
    await owner.start()
    filler = owner.put("cd" * 32, [bytes(2**20 - 2 * 4096)], 60)
    assert filler is not None
    kv = await stored(owner, request_of())
    assert [(blocks.first, blocks.num_blocks) for blocks in kv] == [(0, 3), (3, 3)]
    await owner.close()


async def test_a_blob_that_was_there_before_is_shared(pair: tuple[Blobs, Blobs]) -> None:
    owner, reader = pair
    request = request_of()
    first, second = [await stored(owner, request) for _ in range(2)]
    assert owner.num_pinned == 4
    assert [blocks.digest for blocks in first] == [blocks.digest for blocks in second]
    for blocks in first:
        await reader.release(blocks.ref)
    assert await num_read(reader, request, second) == 20


def test_a_layout_covers_every_byte_of_the_weights(tmp_path: Path) -> None:
    weights, adapter = tmp_path / "model.safetensors", tmp_path / "a" / "adapter_model.safetensors"
    adapter.parent.mkdir()

    def names() -> tuple[str, str]:
        model = ModelConfig(str(tmp_path), adapters={"a": str(adapter.parent)})
        layout = KVLayout.of(model, ["torch"])
        return layout.name_of(None, ["ab"]), layout.name_of("a", ["ab"])

    (tmp_path / "config.json").write_text("{}")
    weights.write_bytes(bytes(1000))
    adapter.write_bytes(bytes(100))
    before = names()
    adapter.write_bytes(bytes(99) + b"\1")
    adapted = names()
    assert adapted[0] == before[0]
    assert adapted[1] != before[1]
    weights.write_bytes(bytes(500) + b"\1" + bytes(499))
    assert not {*names()} & {*adapted, *before}
