"""A rendered prompt on its way to the engine."""

from collections.abc import Sequence

from PIL import Image

from shared.codec.envelope import decode, encode
from shared.codec.tensors import to_torch
from shared.protocol.messages import EngineTask, RequestTicket
from shared.protocol.sampling import SamplingParams
from tests.engine.model.test_parity import Case
from workers.engine.core.sequence import EngineRequest, Item
from workers.renderer.processing.processor import Rendered


def make_case(
    name: str, rendered: Rendered, images: Sequence[Image.Image], max_tokens: int
) -> Case:
    """Return the engine's request after a passage through the envelope."""
    task = EngineTask(
        name,
        "model",
        "batch",
        rendered.prompt_token_ids,
        rendered.items,
        SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True),
        RequestTicket(0.0, 1.0, 1, "receipt"),
        [],
    )
    received, tensors = decode(encode(task, rendered.tensors), EngineTask)
    items = []
    for item in received.items:
        fields = {field: to_torch(tensors[index]) for field, index in item.fields.items()}
        items.append(Item(item.modality, item.mm_hash, item.placeholder, fields))
    request = EngineRequest(name, received.prompt_token_ids, items, received.sampling_params)
    return Case(request, list(images))
