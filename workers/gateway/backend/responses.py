"""Operations on responses: find, begin, end, cancel, delete and show them."""

import asyncio
import contextlib
import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, NamedTuple

from msgspec.structs import replace
from starlette.requests import Request

from shared import client
from shared.bus.bus import Bus
from shared.bus.metering import LogUse
from shared.config.schema import AgentConfig
from shared.errors import (
    DeadlineExceeded,
    Fenced,
    InvalidRequest,
    NotFound,
    Overloaded,
    PagemillError,
)
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.items import RESPONSE_PREFIX, Item, response_of_item
from shared.protocol.records import error_info
from shared.protocol.requests import GenerateRequest
from shared.protocol.steps import Begun, Ended, ResponseTask, painting_id, turn_id
from shared.state.log_reader import GRACE_S
from shared.state.step_log import StepLog, open_conversation, open_log
from shared.tenants.storage_quotas import LOG_STREAMS
from workers.gateway.app import AppContext
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import ApprovalUsed, ReusedId, StoreFull, UnknownPreviousResponse
from workers.gateway.openai.response_object import response_of
from workers.gateway.openai.responses import MAX_ANCESTORS, ConversationBefore, references_of
from workers.gateway.schemas.responses import ResponseBody

# Fraction of the store above which new responses are refused. The rest is for running responses.
MAX_FULL = 0.9
# Steps take more memory than their JSON.
MEMORY_FACTOR = 3


class FirstTurn(NamedTuple):
    """The request to the model for the first turn of a response."""

    request: GenerateRequest
    sampling: dict[str, Any]


def new_response_id(request: Request, tenant: str) -> tuple[str, bool]:
    """Return the id of a response, and whether the client has named it.

    The same name from the same tenant means the same response. So does the id of the same line of
    a batch, which is in the scope of the request.
    """
    line: tuple[str, bool] | None = request.scope.get("request_id")
    name = request.headers.get("idempotency-key") or request.headers.get("x-request-id")
    if name is None:
        return RESPONSE_PREFIX + secrets.token_hex(24), False
    kind = "response" if line is None else "line"
    digest = hashlib.sha256(f"{kind}:{tenant}:{name}".encode()).hexdigest()
    return RESPONSE_PREFIX + digest, True


async def find_response(
    context: AppContext, caller: Caller, response_id: str, *, also_unstored: bool = False
) -> StepLog:
    """Return the log of a response.

    Raises NotFound, also for a response of another tenant. A response with `store: false` is not
    found after its end, unless `also_unstored` is set.
    """
    missing = NotFound(f"there is no response {response_id!r}, or it is deleted", field="id")
    if not names.is_request_id(response_id):
        raise missing
    log = await open_log(context.bus, caller.tenant, response_id)
    if log.state.begun is None:
        raise missing
    await end_if_late(context, log)
    if log.state.ended is not None and not (also_unstored or log.state.begun.store):
        raise missing
    return log


async def find_context(
    context: AppContext, request: Request, caller: Caller, previous_id: str | None
) -> tuple[ConversationBefore, list[StepLog]]:
    """Return the conversation that a response continues, and the logs of its earlier responses.

    Memory for the logs is reserved with the memory for the body. Raises UnknownPreviousResponse,
    InvalidRequest for a response that cannot be continued, ContextTooLong or Overloaded.
    """
    field = "previous_response_id"
    if previous_id is None:
        return ConversationBefore(), []
    missing = UnknownPreviousResponse(
        f"there is no response {previous_id!r}, or one that it continues is deleted", field=field
    )
    if not names.is_request_id(previous_id):
        raise missing
    last = await open_log(context.bus, caller.tenant, previous_id)
    if last.state.begun is None or not last.state.begun.store:
        raise missing
    ended = last.state.ended
    if ended is None or ended.status not in ("completed", "incomplete"):
        raise InvalidRequest("this response is not complete", field=field)
    ancestors = last.state.begun.ancestors
    if len(ancestors) >= MAX_ANCESTORS:
        raise InvalidRequest(
            f"a response may continue at most {MAX_ANCESTORS} earlier responses", field=field
        )
    max_bytes = context.config.agent.max_conversation_mib * 2**20 - last.num_bytes
    logs: list[StepLog] = []
    try:
        async for log in open_conversation(context.bus, caller.tenant, ancestors, max_bytes):
            context.bodies.reserve(request, MEMORY_FACTOR * log.num_bytes)
            logs.append(log)
    except NotFound:
        raise missing from None
    logs.append(last)
    items: list[Item] = [item for log in logs for item in log.state.items]
    return ConversationBefore([*ancestors, previous_id], items), logs


async def find_references(
    context: AppContext, request: Request, caller: Caller, value: Any
) -> dict[str, Item]:
    """Return the stored items that an input refers to, by their ids.

    Unknown ids are left out. Raises NotFound for an item of a deleted response, ContextTooLong,
    Overloaded or Unavailable.
    """
    response_ids = {response_of_item(name) or "" for name in references_of(value)}
    known_ids = sorted(filter(names.is_request_id, response_ids))
    max_bytes = context.config.agent.max_conversation_mib * 2**20
    items: dict[str, Item] = {}
    async for log in open_conversation(context.bus, caller.tenant, known_ids, max_bytes, "input"):
        context.bodies.reserve(request, MEMORY_FACTOR * log.num_bytes)
        if log.state.begun is not None and log.state.begun.store:
            items |= {item.id: item for item in log.state.items if item.id is not None}
    return items


async def check_room(context: AppContext, tenant: str) -> None:
    """Raise StoreFull when the store or the tenant's share of it is used up.

    Raises DiskFull or QuotaExceeded as well.
    """
    await context.room.check()
    await context.quotas.check(tenant, LOG_STREAMS)
    limits = context.config.agent
    if await is_store_full(context):
        raise StoreFull("the store of responses is full")
    use = await context.store_use.read(tenant)
    if _reaches(use, limits):
        use = await context.store_use.read_exact(tenant)
    if _reaches(use, limits):
        raise StoreFull(
            f"{use.num_logs} responses of {use.num_bytes} bytes are stored; the limits are"
            f" {limits.max_stored} and {limits.max_stored_mib} MiB"
        )


def _reaches(use: LogUse, limits: AgentConfig) -> bool:
    return use.num_logs >= limits.max_stored or use.num_bytes >= limits.max_stored_mib * 2**20


async def is_store_full(context: AppContext) -> bool:
    """Return whether the store has no room for new responses of any tenant. Raises Unavailable."""
    return await context.store_size.read() > MAX_FULL * context.config.agent.store_mib * 2**20


async def begin(
    context: AppContext,
    begun: Begun,
    response_id: str,
    first: FirstTurn | None = None,
    *,
    is_named: bool,
) -> StepLog:
    """Store the first step of a response, and publish its task for agents and its `first` turn.

    All three happen at the same time. An agent that gets the task before the step is stored waits a
    limited time for the step. The task of a named response is published after its step: the client
    may send the response again when this gateway dies, and the broker would drop the second task.

    Raises ReusedId when a response of this name has different content, ApprovalUsed, StoreFull,
    PayloadTooLarge, Overloaded or Unavailable.
    """
    log = StepLog(context.bus, begun.tenant, response_id)
    if is_named:
        await _append_first(context, log, begun, is_named=True)
        await publish_task(context.bus, begun, response_id)
        return log
    publishing = asyncio.create_task(publish_task(context.bus, begun, response_id))
    publishing_turn: asyncio.Task[None] | None = None
    if first is not None:
        # This is not awaited. If it fails, an agent publishes the turn again, or reports the error.
        publishing_turn = context.background.start(
            _publish_turn(context.bus, log, first, begun.trace)
        )
    try:
        await _append_first(context, log, begun, is_named=False)
    finally:
        (error,) = await asyncio.gather(publishing, return_exceptions=True)
        if publishing_turn and (error is not None or log.state.begun is None):
            await asyncio.wait({publishing_turn})
            # The response does not exist, so the answer to its turn is not needed.
            with contextlib.suppress(PagemillError):
                await client.cancel(context.bus, turn_id(log.tenant, response_id, 0))
    if error is not None:
        raise error
    return log


async def _append_first(context: AppContext, log: StepLog, begun: Begun, *, is_named: bool) -> None:
    """Store the first step, unless an earlier request of the same name has stored it."""
    try:
        await log.append(begun)
        context.store_use.note_added(begun.tenant, log.num_bytes)
    except Fenced:
        stored = log.state.begun
        if stored is None:
            raise ApprovalUsed("another response has decided on these approval requests") from None
        times = {"created_s": begun.created_s, "deadline_s": begun.deadline_s}
        if not is_named or replace(stored, trace=begun.trace, **times) != begun:
            raise ReusedId(
                "this id belongs to an earlier response with a different request",
                field="X-Request-Id",
            ) from None
    except Overloaded:
        raise StoreFull("the store of responses is full") from None


async def _publish_turn(bus: Bus, log: StepLog, turn: FirstTurn, trace: Mapping[str, str]) -> None:
    with contextlib.suppress(PagemillError):
        name = turn_id(log.tenant, log.response_id, 0)
        await client.publish_request(bus, turn.request, name, turn.sampling or None, trace)


async def publish_task(bus: Bus, begun: Begun, response_id: str) -> None:
    """Publish the task of a response for the agents. A second task of one response has no effect.

    Raises Overloaded or Unavailable.
    """
    task = to_json(ResponseTask(response_id, begun.tenant))
    await bus.publish(subjects.response(begun.model), task, response_id)


async def end_if_late(context: AppContext, log: StepLog) -> None:
    """End a response as failed after its deadline, or if no agent begins it while its client waits.

    Raises Unavailable.
    """
    begun, now_s = log.state.begun, context.now_s
    if begun is None or log.state.ended is not None:
        return
    message = None
    if begun.deadline_s is not None and now_s > begun.deadline_s:
        message = "the response has not ended in time"
    is_awaited = log.state.num_steps == 1 and not begun.background
    # A first turn that a gateway published has the same deadline. An agent then records its end.
    patience_s = context.config.delivery.default_timeout_s + (GRACE_S if begun.asks else 0.0)
    if is_awaited and now_s > begun.created_s + patience_s:
        message = "no agent has continued the response in time"
    if message is None:
        return
    error = error_info(DeadlineExceeded(message))
    # Another worker has appended a step, or the store has no room for this one.
    with contextlib.suppress(Fenced, Overloaded):
        await log.append(Ended(0, "failed", now_s, error=error))


async def cancel_response(context: AppContext, log: StepLog) -> None:
    """End a response as cancelled, unless it has ended. Cancel its open turn and its images."""
    while log.state.ended is None:
        log.overtaken = False  # The end may follow any step of another worker.
        ended = Ended(0, "cancelled", context.now_s)
        try:
            await log.append(ended)
        except Fenced:
            continue
        await client.cancel_all(context.bus, log.state.open_requests)


async def delete_response(context: AppContext, log: StepLog) -> None:
    """Remove a response and the token logs of its turns; one that has not ended is cancelled."""
    await cancel_response(context, log)
    for turn in log.state.turns:
        name = subjects.tokens(turn_id(log.tenant, log.response_id, turn.turn))
        await context.bus.purge(subjects.TOKENS_STREAM, name)
    for call in log.state.calls.values():
        if call.paints:
            name = painting_id(log.tenant, log.response_id, call.turn, call.number)
            for subject in (subjects.tokens(name), subjects.logs_beside_text(name)):
                await context.bus.purge(subjects.TOKENS_STREAM, subject)
    await log.delete()
    context.store_use.note_deleted(log.tenant, log.num_bytes)


async def load_token_bytes(context: AppContext, log: StepLog) -> None:
    """Load the bytes of all tokens in the log probabilities of a response."""
    begun = log.state.begun
    if begun is None or not begun.logprobs:
        return
    token_ids: set[int] = set()
    for answer in log.state.answers:
        token_ids.update(answer.token_ids)
        for logprobs in answer.logprobs:
            token_ids.update(logprobs.top_token_ids)
    await context.token_bytes.load(begun.model, token_ids, begun.tenant)


async def show(context: AppContext, log: StepLog) -> ResponseBody:
    """Return the response as it is now."""
    assert log.state.begun is not None
    await load_token_bytes(context, log)
    return response_of(log.state, context.token_bytes.of(log.state.begun.model))
