"""`/v1/chat/completions/render` and `/v1/completions/render`: a request as other engines take it.

Renderers do the work, and no engine is needed. The response can be sent to `/inference/v1/generate`
of any server of the model, this one included.
"""

import asyncio
import secrets
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from shared.errors import InvalidGrammar
from shared.protocol.requests import GenerateRequest
from workers.gateway.app import AppContext, Json
from workers.gateway.core.assembler import Options
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.chat import plan_chat
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.openai.completions import COMPLETION, plan_completion
from workers.gateway.route_table import RENDERER_ERRORS, SCALE_OUT
from workers.gateway.routes.vllm_common import (
    Payload,
    read_body,
    render_features,
    resolve_model,
    vllm_route_table,
)
from workers.gateway.schemas import openai_request
from workers.gateway.schemas.generate import GenerateStreamOptions, RenderedRequest
from workers.gateway.vllm.errors import decode
from workers.gateway.vllm.features import features_of
from workers.gateway.vllm.sampling import resolve_max_tokens, resolve_sampling, write_sampling

ROUTES = vllm_route_table(SCALE_OUT, refuses=(*RENDERER_ERRORS, InvalidGrammar), counted=True)


class RenderChat(openai_request.ChatRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    request_id: str | None = None
    mm_payload: Payload | None = None
    return_mm_kwargs: bool | None = None
    """An older name: false means the payload `none`."""
    return_token_offsets: Literal[False] | None = None


class RenderCompletion(
    openai_request.CompletionRequest, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """The fields of RenderChat are repeated, because a Struct has one base."""

    request_id: str | None = None
    mm_payload: Payload | None = None
    return_mm_kwargs: bool | None = None
    return_token_offsets: Literal[False] | None = None


RenderBody = RenderChat | RenderCompletion

# vLLM's renderers know this option too.
UNSUPPORTED = openai_request.UNSUPPORTED | {"return_token_offsets"}


@ROUTES.endpoint(
    "POST",
    "/v1/chat/completions/render",
    "The request to an engine that a conversation becomes",
    answer=RenderedRequest,
    body=RenderChat,
)
async def chat(context: AppContext, request: Request, caller: Caller) -> Response:
    asked = decode(await read_body(context, request), RenderChat, UNSUPPORTED)
    model = resolve_model(context, asked.model)
    card = await context.model_card(model) if asked.tools else None
    # Other engines read other grammars.
    plan = plan_chat(asked, card, strict=False)
    wire_id = f"chatcmpl-{_base_id(request, asked)}"
    return Json(await _render(context, plan.requests[0], wire_id, asked, plan, caller))


@ROUTES.endpoint(
    "POST",
    "/v1/completions/render",
    "The request to an engine that each prompt becomes",
    answer=list[RenderedRequest],
    body=RenderCompletion,
)
async def completion(context: AppContext, request: Request, caller: Caller) -> Response:
    asked = decode(await read_body(context, request), RenderCompletion, UNSUPPORTED)
    resolve_model(context, asked.model)
    if asked.echo:
        raise UnsupportedParameter("echo: a rendered request has no answer yet", field="echo")
    plan = plan_completion(asked)
    wire_id, is_single = f"cmpl-{_base_id(request, asked)}", len(plan.requests) == 1
    wire_ids = [wire_id if is_single else f"{wire_id}-{i}" for i in range(len(plan.requests))]
    rendered = await asyncio.gather(
        *(
            _render(context, part, part_id, asked, plan, caller)
            for part, part_id in zip(plan.requests, wire_ids, strict=True)
        )
    )
    return Json(rendered)


async def _render(
    context: AppContext,
    request: GenerateRequest,
    wire_id: str,
    asked: RenderBody,
    plan: SubmitPlan[Options],
    caller: Caller,
) -> RenderedRequest:
    model, payload = request.model, asked.mm_payload
    if payload is None:
        payload = "none" if asked.return_mm_kwargs is False else "tensors"
    defaults = context.config.models[model].sampling_defaults
    kind = COMPLETION if isinstance(asked, RenderCompletion) else CHAT
    with kind.client_fields.renamed(plan.options.fields).translated(checks=True):
        sampling = resolve_sampling(defaults, plan.sampling)
        card, rendered = await asyncio.gather(
            context.model_card(model), render_features(context, request, payload, caller)
        )
        num_prompt = len(rendered.prompt_token_ids)
        max_tokens = resolve_max_tokens(sampling.max_tokens, num_prompt, card.max_model_len)
    stream, options = bool(asked.stream), None
    if stream and asked.stream_options is not None:
        options = msgspec.convert(asked.stream_options, GenerateStreamOptions, from_attributes=True)
    return RenderedRequest(
        request_id=wire_id,
        token_ids=rendered.prompt_token_ids,
        features=features_of(rendered.features, with_tensors=payload == "tensors"),
        sampling_params=write_sampling(sampling, max_tokens, stream),
        model=model,
        stream=stream,
        stream_options=options,
        cache_salt=asked.cache_salt,
        priority=asked.priority or 0,
    )


def _base_id(request: Request, asked: RenderBody) -> str:
    return request.headers.get("x-request-id") or asked.request_id or secrets.token_hex(8)
