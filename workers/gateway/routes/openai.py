"""`/v1/chat/completions` and `/v1/completions`."""

import asyncio
from typing import TypeVar

import msgspec
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.protocol.renderer_rpc import DetokenizeRequest, Tokenized, TokenizeRequest
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.ids import read_request_id
from workers.gateway.core.plan import SubmitPlan, UsageOptions
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import unwrap_reply
from workers.gateway.openai.chat import plan_chat
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.openai.completions import COMPLETION, CompletionOptions, Echo, plan_completion
from workers.gateway.openai.spoken import with_speech
from workers.gateway.route_table import ANSWER_ERRORS, STREAM_PARAMETERS, RouteTable
from workers.gateway.schemas.openai_request import UNSUPPORTED, ChatRequest, CompletionRequest
from workers.gateway.schemas.openai_response import ChatChunk, ChatCompletion, Completion

Usage = TypeVar("Usage", bound=UsageOptions)

ROUTES = RouteTable("Answers", refuses=ANSWER_ERRORS, parameters=STREAM_PARAMETERS, counted=True)


@ROUTES.endpoint(
    "POST",
    "/v1/chat/completions",
    "Answer a conversation, with images, videos and sounds",
    answer=ChatCompletion,
    body=ChatRequest,
    chunk=ChatChunk,
)
async def chat(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, CHAT, caller.tenant)
    asked = await context.bodies.decode(request, ChatRequest, UNSUPPORTED)
    context.check_model(asked.model)
    card = await context.model_card(asked.model) if asked.tools else None
    pipeline, delivery = context.pipelines[asked.model], context.config.delivery
    plan = with_speech(plan_chat(asked, card), asked, pipeline, delivery.token_log_age_s)
    with CHAT.fields_of(plan.options).translated():
        plan = await _with_prompt_tokens(context, plan, caller)
    return await submit(context, request, caller, CHAT, plan)


@ROUTES.endpoint(
    "POST",
    "/v1/completions",
    "Continue a prompt",
    answer=Completion,
    body=CompletionRequest,
    chunk=Completion,
)
async def completion(context: AppContext, request: Request, caller: Caller) -> Response:
    read_request_id(request, COMPLETION, caller.tenant)
    asked = await context.bodies.decode(request, CompletionRequest, UNSUPPORTED)
    context.check_model(asked.model)
    plan = plan_completion(asked)
    with COMPLETION.fields_of(plan.options).translated():
        if asked.echo:
            plan = await _with_echo(context, plan, caller, is_scored=asked.logprobs is not None)
        plan = await _with_prompt_tokens(context, plan, caller)
    return await submit(context, request, caller, COMPLETION, plan)


async def _with_prompt_tokens(
    context: AppContext, plan: SubmitPlan[Usage], caller: Caller
) -> SubmitPlan[Usage]:
    """Add the number of prompt tokens where every chunk reports usage. A log has it at its end."""
    if not plan.options.continuous_usage:
        return plan
    token_ids = [r.prompt_token_ids for r in plan.requests if r.prompt_token_ids is not None]
    texts = [request for request in plan.requests if request.prompt_token_ids is None]
    tokenized = await asyncio.gather(*(_tokenize(context, text, caller) for text in texts))
    num_tokens = sum(map(len, token_ids)) + sum(reply.count for reply in tokenized)
    options: Usage = replace(plan.options, prompt_tokens=num_tokens)
    return replace(plan, options=options)


async def _tokenize(context: AppContext, request: GenerateRequest, caller: Caller) -> Tokenized:
    # The fields of the question are those of the request, except for one that has its default.
    question = msgspec.convert(request, TokenizeRequest, from_attributes=True)
    return unwrap_reply(
        await client.tokenize(context.bus, request.model, question, tenant=caller.tenant)
    )


async def _with_echo(
    context: AppContext, plan: SubmitPlan[CompletionOptions], caller: Caller, *, is_scored: bool
) -> SubmitPlan[CompletionOptions]:
    """Add the text of the prompts. Prompts that are scored are sent as token ids, so that the
    scored tokens are the ones that the engine gets."""
    requests: list[GenerateRequest] = []
    echoes: list[Echo] = []
    for given in plan.requests:
        request, token_ids, text = given, given.prompt_token_ids, given.prompt
        if token_ids is None and is_scored:
            token_ids = (await _tokenize(context, request, caller)).token_ids
            request = replace(
                request, prompt=None, prompt_token_ids=token_ids, add_special_tokens=None
            )
        if text is None:
            assert token_ids is not None
            question = DetokenizeRequest(token_ids)
            reply = client.detokenize(context.bus, given.model, question, tenant=caller.tenant)
            text = unwrap_reply(await reply).prompt
        requests.append(request)
        if is_scored and token_ids is not None:
            await context.token_bytes.load(request.model, token_ids, caller.tenant)
        echoes.append(Echo(text, token_ids or [] if is_scored else []))
    return replace(plan, requests=requests, options=replace(plan.options, echo=echoes))
