"""Tasks as the stages of the default pipeline write them."""

from collections.abc import Sequence

from shared.protocol.multimodal import MultiModalKwargsItem
from shared.protocol.requests import Prompt
from shared.protocol.sampling import SamplingParams
from shared.protocol.task_messages import (
    EncodeBody,
    EngineBody,
    RenderBody,
    RequestTicket,
    Task,
    TaskHeader,
)

TICKET = RequestTicket(0.0, 1.0, 1, "receipt")


def engine_task(
    request_id: str,
    token_ids: list[int],
    items: Sequence[MultiModalKwargsItem] = (),
    sampling: SamplingParams | None = None,
    *,
    model: str = "m",
    lane: str = "batch",
    ticket: RequestTicket = TICKET,
) -> Task[EngineBody]:
    sampling = sampling or SamplingParams()
    header = TaskHeader(request_id, model, lane, ticket, sampling)
    return Task(header, EngineBody(token_ids, list(items)))


def render_task(
    request_id: str,
    prompt: Prompt,
    *,
    model: str = "m",
    lane: str = "interactive",
    ticket: RequestTicket = TICKET,
) -> Task[RenderBody]:
    return Task(TaskHeader(request_id, model, lane, ticket), RenderBody(prompt))


def encode_task(
    name: str, key: str, item: MultiModalKwargsItem, *, model: str, lane: str, expires_ms: float
) -> Task[EncodeBody]:
    header = TaskHeader(name, model, lane, expires_ms=expires_ms)
    return Task(header, EncodeBody(key, item))
