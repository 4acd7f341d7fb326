"""Path of a request from the renderer to the engine, in one process and without a broker."""

from collections.abc import Iterable

from shared.codec.envelope import decode, encode
from shared.codec.tensors import to_torch
from shared.errors import PagemillError
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import EngineBody, Task
from tests.tasks import engine_task
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, Item
from workers.renderer.processing.processor import Rendered

GREEDY = SamplingParams(temperature=0.0, max_tokens=8)


def pack(rendered: Rendered, request_id: str = "r", sampling: SamplingParams = GREEDY) -> bytes:
    """Encode the task that a renderer publishes, with every tensor inline."""
    task = engine_task(request_id, rendered.prompt_token_ids, rendered.items, sampling)
    return encode(task, rendered.tensors)


def unpack(data: bytes | bytearray | memoryview) -> EngineRequest:
    """Decode a task into an engine's request; the tensors are views of `data`."""
    task, tensors = decode(data, Task[EngineBody])
    items = [
        Item(
            item.modality,
            item.mm_hash,
            item.placeholder,
            {name: to_torch(tensors[index]) for name, index in item.fields.items()},
        )
        for item in task.body.items
    ]
    return EngineRequest(
        task.header.request_id, task.body.prompt_token_ids, items, task.header.sampling
    )


def run(
    core: EngineCore, requests: Iterable[EngineRequest]
) -> tuple[dict[str, list[int]], dict[str, PagemillError]]:
    """Run all requests together to their ends; return the tokens and the errors by request."""
    answers: dict[str, list[int]] = {}
    errors: dict[str, PagemillError] = {}
    for request in requests:
        answers[request.request_id] = []
        try:
            core.add(request)
        except PagemillError as error:
            errors[request.request_id] = error
    while core.has_work:
        for output in core.step():
            if output.error is not None:
                errors[output.request_id] = output.error
            for delta in output.choices:
                answers[output.request_id] += delta.token_ids
    assert core.stats().num_free_blocks == core.stats().num_blocks
    return answers, errors
