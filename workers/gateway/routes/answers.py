"""Endpoints that answer with text, embeddings or scores."""

import asyncio
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from shared import client
from shared.protocol.renderer_rpc import DetokenizeRequest, Tokenized, TokenizeRequest
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext
from workers.gateway.backend.uploads import store_large_images
from workers.gateway.core.plan import SubmitPlan, UsageOptions
from workers.gateway.openai.chat import ChatOptions, plan_chat
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.openai.completions import COMPLETION, CompletionOptions, Echo, plan_completion
from workers.gateway.openai.demo import DEMO, DemoOptions, plan_demo
from workers.gateway.openai.embeddings import EMBEDDING, EmbeddingOptions, plan_embedding
from workers.gateway.openai.scores import RERANK, SCORE, ScoreOptions, plan_rerank, plan_score
from workers.gateway.openai.spoken import with_speech
from workers.gateway.route_table import (
    ANSWER_ERRORS,
    ID_PARAMETERS,
    STREAM_PARAMETERS,
    Call,
    RouteTable,
)
from workers.gateway.schemas import scores
from workers.gateway.schemas.demo import DemoAnswer, DemoRequest
from workers.gateway.schemas.embeddings import EmbeddingList, EmbeddingRequest
from workers.gateway.schemas.openai_request import UNSUPPORTED, ChatRequest, CompletionRequest
from workers.gateway.schemas.openai_response import ChatChunk, ChatCompletion, Completion
from workers.gateway.schemas.scores import RerankList, RerankRequest, ScoreList, ScoreRequest

Usage = TypeVar("Usage", bound=UsageOptions)

ROUTES = RouteTable("Answers", refuses=ANSWER_ERRORS, counted=True)


@ROUTES.answer(
    CHAT,
    "/v1/chat/completions",
    summary="Answer a conversation, with images, videos, sounds and documents",
    body=ChatRequest,
    unsupported=UNSUPPORTED,
    answer=ChatCompletion,
    chunk=ChatChunk,
    parameters=STREAM_PARAMETERS,
)
async def chat(call: Call, body: ChatRequest) -> SubmitPlan[ChatOptions]:
    context = call.context
    card = await context.model_card(body.model) if body.tools else None
    pipeline, stored_s = context.pipelines[body.model], context.config.delivery.token_log_age_s
    plan = with_speech(plan_chat(body, card), body, pipeline, stored_s)
    call.fields = CHAT.fields_of(plan.options)
    return await with_prompt_tokens(call, plan) if plan.options.continuous_usage else plan


@ROUTES.answer(
    COMPLETION,
    "/v1/completions",
    summary="Continue a prompt",
    body=CompletionRequest,
    unsupported=UNSUPPORTED,
    answer=Completion,
    chunk=Completion,
    parameters=STREAM_PARAMETERS,
)
async def completion(call: Call, body: CompletionRequest) -> SubmitPlan[CompletionOptions]:
    plan = plan_completion(body)
    call.fields = COMPLETION.fields_of(plan.options)
    if body.echo:
        plan = await _with_echo(call, plan, is_scored=body.logprobs is not None)
    return await with_prompt_tokens(call, plan) if plan.options.continuous_usage else plan


@ROUTES.answer(
    DEMO,
    "/generate",
    summary="Continue a prompt, as vLLM's demo server does; a stream is a line of JSON for each"
    " change",
    body=DemoRequest,
    unsupported=UNSUPPORTED,
    answer=DemoAnswer,
    parameters=ID_PARAMETERS,
)
async def demo(call: Call, body: DemoRequest) -> SubmitPlan[DemoOptions]:
    models = call.context.config.models
    body = replace(body, model=body.model or next(iter(models)))
    return plan_demo(body, models[body.model].sampling_defaults.get("n", 1))


@ROUTES.answer(
    EMBEDDING,
    "/v1/embeddings",
    summary="Embed texts or prompts of token ids",
    body=EmbeddingRequest,
    answer=EmbeddingList,
    parameters=ID_PARAMETERS,
)
async def embed(call: Call, body: EmbeddingRequest) -> SubmitPlan[EmbeddingOptions]:
    return plan_embedding(body)


@ROUTES.answer(
    SCORE,
    "/score",
    "/v1/score",
    summary="Score pairs of texts by the similarity of their embeddings",
    body=ScoreRequest,
    unsupported=scores.UNSUPPORTED,
    answer=ScoreList,
    parameters=ID_PARAMETERS,
)
async def score(call: Call, body: ScoreRequest) -> SubmitPlan[ScoreOptions]:
    return plan_score(body)


@ROUTES.answer(
    RERANK,
    "/rerank",
    "/v1/rerank",
    "/v2/rerank",
    summary="Order documents by the similarity of their embeddings with a query's",
    body=RerankRequest,
    unsupported=scores.UNSUPPORTED,
    answer=RerankList,
    parameters=ID_PARAMETERS,
)
async def rerank(call: Call, body: RerankRequest) -> SubmitPlan[ScoreOptions]:
    return plan_rerank(body)


async def with_prompt_tokens(call: Call, plan: SubmitPlan[Usage]) -> SubmitPlan[Usage]:
    """Add the number of prompt tokens, for answers that report it before the end of their log."""
    num_tokens = await count_prompt_tokens(call.context, plan, call.caller.tenant)
    options: Usage = replace(plan.options, prompt_tokens=num_tokens)
    return replace(plan, options=options)


async def count_prompt_tokens(context: AppContext, plan: SubmitPlan[Any], tenant: str) -> int:
    """Return the number of tokens of all prompts. Raises the errors of renderers."""
    token_ids = [r.prompt_token_ids for r in plan.requests if r.prompt_token_ids is not None]
    texts = [request for request in plan.requests if request.prompt_token_ids is None]
    tokenized = await asyncio.gather(*(_tokenize(context, text, tenant) for text in texts))
    return sum(map(len, token_ids)) + sum(reply.count for reply in tokenized)


async def _tokenize(context: AppContext, request: GenerateRequest, tenant: str) -> Tokenized:
    small = await store_large_images(context, request, tenant)
    # A TokenizeRequest has the same fields, and one more, which keeps its default.
    question = msgspec.convert(small, TokenizeRequest, from_attributes=True)
    return await client.tokenize(context.bus, request.model, question, tenant)


async def _with_echo(
    call: Call, plan: SubmitPlan[CompletionOptions], *, is_scored: bool
) -> SubmitPlan[CompletionOptions]:
    """Add the text of the prompts. Prompts that are scored are sent as token ids, so that the
    scored tokens are the ones that the engine gets."""
    context, tenant = call.context, call.caller.tenant
    requests: list[GenerateRequest] = []
    echoes: list[Echo] = []
    for request in plan.requests:
        token_ids, text = request.prompt_token_ids, request.prompt
        if token_ids is None and is_scored:
            token_ids = (await _tokenize(context, request, tenant)).token_ids
            request = replace(
                request, prompt=None, prompt_token_ids=token_ids, add_special_tokens=None
            )
        if text is None:
            assert token_ids is not None
            question = DetokenizeRequest(token_ids)
            reply = client.detokenize(context.bus, request.model, question, tenant=tenant)
            text = (await reply).prompt
        requests.append(request)
        if is_scored and token_ids is not None:
            await context.token_bytes.load(request.model, token_ids, tenant)
        echoes.append(Echo(text, token_ids or [] if is_scored else []))
    return replace(plan, requests=requests, options=replace(plan.options, echo=echoes))
