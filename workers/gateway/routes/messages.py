"""`/v1/messages`: Anthropic's Messages API."""

from starlette.requests import Request
from starlette.responses import Response

from shared.protocol.renderer_rpc import ModelCard
from workers.gateway.anthropic.assembler import MESSAGE
from workers.gateway.anthropic.errors import body_of, status_of
from workers.gateway.anthropic.messages import plan_count, plan_messages
from workers.gateway.app import AppContext, Json, message_error_response
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.http.sse import EventStream
from workers.gateway.openai.chat import ChatOptions
from workers.gateway.route_table import (
    ANSWER_ERRORS,
    RENDERER_ERRORS,
    STREAM_PARAMETERS,
    Call,
    RouteTable,
)
from workers.gateway.routes.answers import count_prompt_tokens, with_prompt_tokens
from workers.gateway.schemas.messages import (
    MESSAGES_UNSUPPORTED,
    CountTokensRequest,
    MessageAnswer,
    MessageErrorAnswer,
    MessageEvent,
    MessagesRequest,
    TokenCount,
)


class MessageStream(EventStream):
    """The events of a message. Each has its type as its name, and there is no event [DONE]."""

    end = b""
    ping = ping_numbered = b'event: ping\ndata: {"type":"ping"}\n\n'
    error_body = staticmethod(body_of)
    error_head = b"event: error\n"


ROUTES = RouteTable(
    "Messages",
    refuse=message_error_response,
    stream=MessageStream,
    status_of=status_of,
    error=MessageErrorAnswer,
    counted=True,
)


@ROUTES.answer(
    MESSAGE,
    "/v1/messages",
    summary="Answer a conversation in the form of Anthropic's API",
    body=MessagesRequest,
    unsupported=MESSAGES_UNSUPPORTED,
    answer=MessageAnswer,
    chunk=MessageEvent,
    refuses=ANSWER_ERRORS,
    parameters=STREAM_PARAMETERS,
)
async def create(call: Call, body: MessagesRequest) -> SubmitPlan[ChatOptions]:
    plan = plan_messages(body, await _card_of(call.context, body))
    call.fields = MESSAGE.fields_of(plan.options)
    # The first event has the number of prompt tokens.
    return await with_prompt_tokens(call, plan) if body.stream else plan


@ROUTES.endpoint(
    "POST",
    "/v1/messages/count_tokens",
    "The number of tokens of a conversation",
    body=CountTokensRequest,
    answer=TokenCount,
    refuses=RENDERER_ERRORS,
)
async def count_tokens(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, CountTokensRequest, MESSAGES_UNSUPPORTED)
    context.check_model(body.model)
    plan = plan_count(body, await _card_of(context, body))
    with MESSAGE.fields_of(plan.options).translated():
        return Json(TokenCount(await count_prompt_tokens(context, plan, caller.tenant)))


async def _card_of(context: AppContext, body: CountTokensRequest) -> ModelCard | None:
    return await context.model_card(body.model) if body.tools else None
