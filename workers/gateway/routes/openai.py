"""`/v1/chat/completions` and `/v1/completions`."""

import asyncio
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared import client
from shared.protocol.messages import GenerateRequest, RequestRecord
from shared.protocol.renderer_rpc import (
    Detokenized,
    DetokenizeRequest,
    ErrorReply,
    Tokenized,
    TokenizeRequest,
)
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.core.field_names import translated_errors
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http import body
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import RequestFailed
from workers.gateway.openai.chat import needs_card, plan_chat
from workers.gateway.openai.chat_assembler import ChatAssembler, ChatOptions
from workers.gateway.openai.completions import (
    CompletionAssembler,
    CompletionOptions,
    Echo,
    plan_completion,
)
from workers.gateway.schemas.openai_request import UNSUPPORTED, ChatRequest, CompletionRequest

T = TypeVar("T")

_chat = msgspec.json.Decoder(ChatRequest)
_completion = msgspec.json.Decoder(CompletionRequest)


def routes(context: AppContext) -> list[Route]:
    context.assemblers["chat"] = _chat_assembler
    context.assemblers["completion"] = _completion_assembler

    async def chat(request: Request, caller: Caller) -> Response:
        asked = await body.decode(request, context.limits, context.body_budget, _chat, UNSUPPORTED)
        context.check_model(asked.model)
        card = await context.model_card(asked.model) if needs_card(asked) else None
        order = plan_chat(asked, card)
        with translated_errors("chat", order.options):
            order = await _counted(context, order, caller)
        return await submit(
            context,
            request,
            caller,
            "chat",
            order,
            stream=bool(asked.stream),
            durable=bool(asked.durable),
        )

    async def completion(request: Request, caller: Caller) -> Response:
        asked = await body.decode(
            request, context.limits, context.body_budget, _completion, UNSUPPORTED
        )
        context.check_model(asked.model)
        order = plan_completion(asked)
        with translated_errors("completion", order.options):
            if asked.echo:
                order = await _echoed(context, order, caller, scored=asked.logprobs is not None)
            order = await _counted(context, order, caller)
        return await submit(
            context,
            request,
            caller,
            "completion",
            order,
            stream=bool(asked.stream),
            durable=bool(asked.durable),
        )

    return [
        context.route("/v1/chat/completions", chat, ["POST"], counted=True),
        context.route("/v1/completions", completion, ["POST"], counted=True),
    ]


def _chat_assembler(request_id: str, record: RequestRecord, spelling: TokenBytes) -> ChatAssembler:
    options = msgspec.convert(record.options, ChatOptions)
    return ChatAssembler(request_id, record.model, record.created_s, options, spelling)


def _completion_assembler(
    request_id: str, record: RequestRecord, spelling: TokenBytes
) -> CompletionAssembler:
    options = msgspec.convert(record.options, CompletionOptions)
    return CompletionAssembler(request_id, record.model, record.created_s, options, spelling)


async def _counted(context: AppContext, order: SubmitPlan, caller: Caller) -> SubmitPlan:
    """With the number of the prompt's tokens, where every chunk is to tell it: a log tells it only
    at its end."""
    if not order.options.get("continuous_usage"):
        return order
    counts = await asyncio.gather(*(_count(context, request, caller) for request in order.requests))
    return replace(order, options=order.options | {"prompt_tokens": sum(counts)})


async def _count(context: AppContext, request: GenerateRequest, caller: Caller) -> int:
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    return (await _tokenized(context, request, caller)).count


async def _tokenized(context: AppContext, request: GenerateRequest, caller: Caller) -> Tokenized:
    question = TokenizeRequest(
        messages=request.messages,
        prompt=request.prompt,
        tools=request.tools,
        template_kwargs=request.template_kwargs,
        add_special_tokens=request.add_special_tokens,
    )
    answer = client.tokenize(context.bus, request.model, question, tenant=caller.tenant)
    return _unless_refused(await answer)


async def _echoed(
    context: AppContext, order: SubmitPlan, caller: Caller, *, scored: bool
) -> SubmitPlan:
    """With the prompts' own text; where they are scored, they go as the tokens that are."""
    requests: list[GenerateRequest] = []
    echoes: list[Echo] = []
    for request in order.requests:
        token_ids = request.prompt_token_ids
        if token_ids is None and scored:
            token_ids = (await _tokenized(context, request, caller)).token_ids
            request = replace(
                request, prompt=None, prompt_token_ids=token_ids, add_special_tokens=None
            )
        text = order.requests[len(echoes)].prompt
        if text is None:
            assert token_ids is not None
            text = (await _detokenized(context, request.model, token_ids, caller)).prompt
        requests.append(request)
        if scored and token_ids is not None:
            await context.token_bytes.load(request.model, token_ids, caller.tenant)
        echoes.append(Echo(text, token_ids or [] if scored else []))
    options: dict[str, Any] = order.options | {"echo": msgspec.to_builtins(echoes)}
    return SubmitPlan(requests, order.sampling, options)


async def _detokenized(
    context: AppContext, model: str, token_ids: list[int], caller: Caller
) -> Detokenized:
    question = DetokenizeRequest(token_ids)
    return _unless_refused(
        await client.detokenize(context.bus, model, question, tenant=caller.tenant)
    )


def _unless_refused(answer: T | ErrorReply) -> T:
    if isinstance(answer, ErrorReply):
        raise RequestFailed(answer.error, "")
    return answer
