"""A rendered prompt on its way to the engine."""

from collections.abc import Sequence

from PIL import Image

from shared.codec.envelope import decode, encode
from shared.codec.tensors import to_torch
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
