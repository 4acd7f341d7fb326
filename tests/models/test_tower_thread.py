"""The tower thread: images share a batch, and an error in it fails one image only."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig

from shared.errors import InvalidRequest
from shared.models.registry import find_tower
from shared.models.tower import Tower, load_tower
from shared.models.tower_adapter import Fields
from shared.models.tower_thread import TowerThread
from workers.settings import DEMO_MODEL


def image(seed: int, side: int = 8) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "pixel_patches": torch.randint(
            0, 256, (side**2, 3, 196), generator=generator, dtype=torch.uint8
        ),
        "pixel_table": torch.linspace(-1, 1, 256).expand(3, 256).contiguous(),
        "image_grid_thw": torch.tensor([1, side, side]),
    }


@pytest.fixture(scope="module")
def demo_tower() -> Tower:
    return load_tower(DEMO_MODEL, torch.float32, "cpu")


class Watched:
    """The demo model's tower; it stumbles over an image whose first pixel is 255."""

    def __init__(self, tower: Tower) -> None:
        self.adapter, self.device = tower.adapter, tower.device
        self._tower = tower
        self.batches: list[int] = []

    def encode(self, batch: Sequence[Fields]) -> list[Tensor]:
        self.batches.append(len(batch))
        if any(fields["pixel_patches"].flatten()[0] == 255 for fields in batch):
            raise ArithmeticError
        return self._tower.encode(batch)


@pytest.fixture
async def watched(demo_tower: Tower) -> AsyncIterator[tuple[TowerThread, Watched]]:
    inner: Any = Watched(demo_tower)
    thread = TowerThread(inner, max_batch_tokens=48)
    working = asyncio.create_task(thread.work())
    yield thread, inner
    working.cancel()
    thread.close()


async def test_images_that_arrive_together_are_encoded_together(
    watched: tuple[TowerThread, Watched], demo_tower: Tower
) -> None:
    thread, inner = watched
    images = [image(seed) for seed in range(7)]
    embeddings = await asyncio.gather(*(thread.encode(fields) for fields in images))
    # 16 tokens each, 48 in a batch.
    assert inner.batches == [3, 3, 1]
    assert (thread.num_encoded, thread.num_batches) == (7, 3)
    for fields, embedding in zip(images, embeddings, strict=True):
        (alone,) = demo_tower.encode([fields])
        assert torch.allclose(embedding, alone, atol=1e-4)


async def test_one_bad_image_fails_alone(watched: tuple[TowerThread, Watched]) -> None:
    thread, inner = watched
    bad = image(1)
    bad["pixel_patches"].view(-1)[0] = 255
    results = await asyncio.gather(
        *(thread.encode(fields) for fields in (image(2), bad, image(3))),
        return_exceptions=True,
    )
    assert isinstance(results[1], ArithmeticError)
    assert isinstance(results[0], Tensor)
    assert isinstance(results[2], Tensor)
    assert inner.batches == [3, 1, 1, 1]


async def test_a_lost_device_ends_the_work_and_answers_no_image(
    demo_tower: Tower, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner: Any = Watched(demo_tower)
    lost = RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail(batch: Sequence[Fields]) -> list[Tensor]:
        inner.batches.append(len(batch))
        raise lost

    monkeypatch.setattr(inner, "encode", fail)
    thread = TowerThread(inner, max_batch_tokens=48)
    waiting = [asyncio.create_task(thread.encode(image(seed))) for seed in range(3)]
    await asyncio.sleep(0)
    with pytest.raises(RuntimeError) as raised:
        await asyncio.wait_for(thread.work(), 10)
    assert raised.value is lost
    assert inner.batches == [3], "the images are not tried one by one"
    assert not any(task.done() for task in waiting)
    for task in waiting:
        task.cancel()
    thread.close()


async def test_a_malformed_image_never_reaches_a_batch(
    watched: tuple[TowerThread, Watched],
) -> None:
    thread, inner = watched
    bad = image(1)
    bad["image_grid_thw"] = torch.tensor([1, 8, 6])
    with pytest.raises(InvalidRequest):
        await thread.encode(bad)
    assert inner.batches == []


async def test_images_are_let_go_when_they_are_encoded(
    watched: tuple[TowerThread, Watched],
) -> None:
    thread, _ = watched
    fields = image(1)
    gone = weakref.ref(fields["pixel_patches"])
    await thread.encode(fields)
    del fields
    await asyncio.sleep(0.01)
    assert gone() is None


async def test_a_caller_that_has_given_up_is_not_served(
    watched: tuple[TowerThread, Watched],
) -> None:
    thread, inner = watched
    gone = asyncio.create_task(thread.encode(image(1)))
    await asyncio.sleep(0)
    gone.cancel()
    await thread.encode(image(2))
    assert sum(inner.batches) == 1


def test_the_sample_is_an_image_that_the_tower_takes(demo_tower: Tower) -> None:
    vision = find_tower(AutoConfig.from_pretrained(DEMO_MODEL))
    assert vision is not None
    sample = vision.sample()
    vision.check(sample)
    (embedding,) = demo_tower.encode([sample])
    vision.check_embedding(sample, embedding)
