"""`/v1/chat/completions/render` and `/v1/completions/render`: requests to engines of any server.

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
from workers.gateway.core.plan import SubmitPlan, is_batch
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.chat import plan_chat
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.openai.completions import COMPLETION, plan_completion
from workers.gateway.route_table import RENDERER_ERRORS, SCALE_OUT
from workers.gateway.routes.vllm_common import (
    Payload,
    render_features,
    resolve_model,
    vllm_route_table,
)
from workers.gateway.schemas import openai_request
from workers.gateway.schemas.generate import GenerateStreamOptions, RenderedRequest
from workers.gateway.vllm.errors import BODY
from workers.gateway.vllm.features import features_of
from workers.gateway.vllm.sampling import resolve_max_tokens, resolve_sampling, write_sampling

ROUTES = vllm_route_table(SCALE_OUT, refuses=(*RENDERER_ERRORS, InvalidGrammar), counted=True)


class RenderChat(openai_request.ChatRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    request_id: str | None = None
    mm_payload: Payload | None = None
    return_mm_kwargs: bool | None = None
    """An older field: false means the payload `none`."""
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

# vLLM's renderers also have this option.
UNSUPPORTED = openai_request.UNSUPPORTED | {"return_token_offsets"}


@ROUTES.endpoint(
    "POST",
    "/v1/chat/completions/render",
    "Convert a conversation to a request to an engine",
    answer=RenderedRequest,
    body=RenderChat,
)
async def chat(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, RenderChat, UNSUPPORTED, BODY)
    model = resolve_model(context, body.model)
    card = await context.model_card(model) if body.tools else None
    # Other servers do not read the grammars that Pagemill writes for calls.
    plan = plan_chat(body, card, strict=False)
    wire_id = f"chatcmpl-{_base_id(request, body)}"
    return Json(await _render(context, plan.requests[0], wire_id, body, plan, caller))


@ROUTES.endpoint(
    "POST",
    "/v1/completions/render",
    "Convert each prompt to a request to an engine",
    answer=list[RenderedRequest],
    body=RenderCompletion,
)
async def completion(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, RenderCompletion, UNSUPPORTED, BODY)
    resolve_model(context, body.model)
    if body.echo:
        raise UnsupportedParameter("echo: a rendered request has no answer yet", field="echo")
    plan = plan_completion(body)
    wire_id, is_single = f"cmpl-{_base_id(request, body)}", len(plan.requests) == 1
    wire_ids = [wire_id if is_single else f"{wire_id}-{i}" for i in range(len(plan.requests))]
    rendered = await asyncio.gather(
        *(
            _render(context, part, part_id, body, plan, caller)
            for part, part_id in zip(plan.requests, wire_ids, strict=True)
        )
    )
    return Json(rendered)


async def _render(
    context: AppContext,
    request: GenerateRequest,
    wire_id: str,
    body: RenderBody,
    plan: SubmitPlan[Options],
    caller: Caller,
) -> RenderedRequest:
    model, payload = request.model, body.mm_payload
    if payload is None:
        payload = "none" if body.return_mm_kwargs is False else "tensors"
    defaults = context.config.models[model].sampling_defaults
    kind = COMPLETION if isinstance(body, RenderCompletion) else CHAT
    with kind.client_fields.renamed(plan.options.fields).translated(checks=True):
        sampling = resolve_sampling(defaults, plan.sampling)
        card, rendered = await asyncio.gather(
            context.model_card(model), render_features(context, request, payload, caller)
        )
        num_prompt = len(rendered.prompt_token_ids)
        max_tokens = resolve_max_tokens(sampling.max_tokens, num_prompt, card.max_model_len)
    stream, options = bool(body.stream), None
    if stream and body.stream_options is not None:
        options = msgspec.convert(body.stream_options, GenerateStreamOptions, from_attributes=True)
    return RenderedRequest(
        request_id=wire_id,
        token_ids=rendered.prompt_token_ids,
        features=features_of(rendered.features, with_tensors=payload == "tensors"),
        sampling_params=write_sampling(sampling, max_tokens, stream),
        model=model,
        stream=stream,
        stream_options=options,
        cache_salt=body.cache_salt,
        priority=body.priority or int(is_batch(body)),
    )


def _base_id(request: Request, body: RenderBody) -> str:
    return request.headers.get("x-request-id") or body.request_id or secrets.token_hex(8)
