"""A rendered prompt on its way to the engine, and items on their way through a tower."""

import functools
from collections.abc import Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from torch import Tensor

from shared.codec.envelope import decode, encode
from shared.codec.tensors import to_torch
from shared.models.generic_tower import GenericTower
from shared.models.tower import Tower
from shared.models.tower_adapter import Fields
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, Task
from tests.engine.model.test_parity import Case
from tests.tasks import engine_task
from workers.engine.core.sequence import EngineRequest, Item
from workers.renderer.processing.processor import Rendered


def make_case(
    name: str, rendered: Rendered, images: Sequence[Image.Image], max_tokens: int
) -> Case:
    """Return the engine's request after a passage through the envelope."""
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    task = engine_task(name, rendered.prompt_token_ids, rendered.items, sampling)
    received, tensors = decode(encode(task, rendered.tensors), Task[EngineBody])
    items = []
    for item in received.body.items:
        fields = {field: to_torch(tensors[index]) for field, index in item.fields.items()}
        items.append(Item(item.modality, item.mm_hash, item.placeholder, fields))
    request = EngineRequest(name, received.body.prompt_token_ids, items, received.header.sampling)
    return Case(request, list(images))


def answer_greedily(
    reference: Any, inputs: Mapping[str, Tensor], num_tokens: int
) -> tuple[list[int], list[int]]:
    """Return the prompt of the inputs, and the tokens of transformers' `generate`."""
    answer = reference.generate(
        **inputs,
        do_sample=False,
        eos_token_id=None,
        min_new_tokens=num_tokens,
        max_new_tokens=num_tokens,
        pad_token_id=0,
    )[0].tolist()
    num_prompt = inputs["input_ids"].shape[1]
    return answer[:num_prompt], answer[num_prompt:]


def assert_joined_as_single(tower: Tower, items: Sequence[Fields], num_calls: int) -> None:
    """Check that the tower joins items to `num_calls` calls of transformers' model, and that their
    embeddings are those of single items."""
    assert isinstance(tower.adapter, GenericTower)
    model: Any = tower.model.base_model
    get_features = getattr(model, tower.adapter.getter)
    calls = []

    @functools.wraps(get_features)
    def count(**inputs: Any) -> Any:
        calls.append(inputs)
        return get_features(**inputs)

    single = [tower.encode([fields])[0] for fields in items]
    with patch.object(model, tower.adapter.getter, count):
        joined = tower.encode(items)
    assert len(calls) == num_calls
    for one, other in zip(joined, single, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
