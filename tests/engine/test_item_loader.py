"""Items of a task: their owner's memory is released in every case."""

import asyncio
import gc
import secrets
from collections.abc import AsyncIterator
from typing import Any

import pytest
import torch

from shared.blobs import mm_items
from shared.blobs.store import Blobs
from shared.bus.bus import Bus
from shared.codec.tensors import from_torch, to_torch
from shared.config.schema import BlobsConfig
from shared.errors import Unavailable
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from workers.engine.item_loader import ItemLoader


class Away:
    """Embeddings of others, while the broker is away."""

    shared = True

    def key_of(self, mm_hash: str) -> str:
        return mm_hash

    async def get(self, key: str, mm_hash: str) -> None:
        raise Unavailable("the broker does not answer")


async def no_progress() -> None:
    pytest.fail("there is nothing to wait for")


def refuse(tensor: object) -> None:
    raise KeyError("a dtype that nobody knows")


@pytest.fixture
async def blobs(bus: Bus) -> AsyncIterator[Blobs]:
    blobs = Blobs(bus, "test", f"test-{secrets.token_hex(4)}", BlobsConfig(arena_mib=1))
    await blobs.start()
    yield blobs
    await blobs.close()


@pytest.mark.parametrize(
    ("embeddings", "restore", "error"),
    [(Away(), to_torch, Unavailable), (None, refuse, KeyError), (None, to_torch, None)],
)
async def test_opened_items_are_closed(
    blobs: Blobs, embeddings: Any, restore: Any, error: type[Exception] | None
) -> None:
    mm_hash = secrets.token_hex(32)
    fields = {"pixels": from_torch(torch.zeros(600, 256))}  # 0.6 MiB
    ref = mm_items.put_item(blobs, mm_hash, 4, fields, 60)
    item = MultiModalKwargsItem("image", mm_hash, PlaceholderRange(0, 4), blob=ref)
    opener = ItemLoader(blobs, embeddings, restore)
    assert ref is not None
    if error is None:
        opened = await opener.open(item, [], no_progress)
        blobs.discard(ref)
        assert mm_items.put_item(blobs, secrets.token_hex(32), 4, fields, 60) is None
        del opened
        gc.collect()
        await asyncio.sleep(0)  # once around the loop
    else:
        with pytest.raises(error):
            await opener.open(item, [], no_progress)
        blobs.discard(ref)
    assert mm_items.put_item(blobs, secrets.token_hex(32), 4, fields, 60) is not None
