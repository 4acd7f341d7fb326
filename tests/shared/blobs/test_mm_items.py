"""Items with any fields and levels, and placeholders that contain text."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.blobs import mm_items
from shared.blobs.transports import Blob
from shared.codec import envelope
from shared.codec.tensors import from_torch, to_torch
from shared.errors import DecodeError
from shared.protocol.multimodal import MultiModalKwargsItem, PlaceholderRange
from shared.protocol.task_messages import EngineBody, Task
from tests.masks import pack_mask
from tests.tasks import engine_task


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_a_mask_marks_the_replaced_tokens(is_embed: list[bool]) -> None:
    placeholder = PlaceholderRange(5, len(is_embed), pack_mask(is_embed))
    assert placeholder.embed_indexes() == [i for i, embeds in enumerate(is_embed) if embeds]
    assert placeholder.num_embeds == sum(is_embed)


def test_without_a_mask_all_tokens_are_replaced() -> None:
    assert PlaceholderRange(5, 11).embed_indexes() == list(range(11))
    assert PlaceholderRange(5, 11).num_embeds == 11


async def test_levels_and_masks_fit_the_envelope() -> None:
    """An item with embeddings of several tower layers (DeepStack) and their grid."""
    fields = {
        "image_grid_thw": torch.tensor([1, 6, 4]),
        "embedding": torch.randn(6, 32).to(torch.bfloat16),
        **{f"deepstack.{level}": torch.randn(6, 32).to(torch.bfloat16) for level in range(3)},
    }
    mask = pack_mask([True, True, True, False] * 2)
    item = MultiModalKwargsItem(
        "image", "ab" * 32, PlaceholderRange(3, 8, mask), {n: i for i, n in enumerate(fields)}
    )
    task = engine_task("r", list(range(20)), [item])
    data = envelope.encode(task, [from_torch(tensor) for tensor in fields.values()])
    received, tensors = envelope.decode(data, Task[EngineBody])
    assert received == task
    nobody: Any = None
    opened, blob = await mm_items.open_item(nobody, received.body.items[0], tensors)
    assert blob is None
    assert {name: to_torch(t).shape for name, t in opened.items()} == {
        name: t.shape for name, t in fields.items()
    }
    assert all(torch.equal(to_torch(opened[name]), tensor) for name, tensor in fields.items())


class OneBlob:
    """Stand-in for `Blobs` with one item of six embeddings."""

    async def get(self, ref: object) -> Blob:
        contents = mm_items.ItemContents({"embedding": 0}, 6)
        data = envelope.encode(contents, [from_torch(torch.zeros(6, 4))])
        return Blob(memoryview(data), lambda: None)


@pytest.mark.parametrize(
    ("placeholder", "fits"),
    [
        (PlaceholderRange(3, 6), True),
        (PlaceholderRange(3, 8, pack_mask([True, True, True, False] * 2)), True),
        (PlaceholderRange(3, 8), False),
        (PlaceholderRange(3, 6, pack_mask([True] * 5 + [False])), False),
    ],
)
async def test_a_blob_fills_its_placeholder_or_is_refused(
    placeholder: PlaceholderRange, fits: bool
) -> None:
    blobs, ref = OneBlob(), object()
    item: Any = MultiModalKwargsItem("image", "ab" * 32, placeholder, blob=ref)  # type: ignore[arg-type]
    if fits:
        opened, _ = await mm_items.open_item(blobs, item, [])  # type: ignore[arg-type]
        assert set(opened) == {"embedding"}
    else:
        with pytest.raises(DecodeError):
            await mm_items.open_item(blobs, item, [])  # type: ignore[arg-type]
