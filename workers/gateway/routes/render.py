"""`/v1/chat/completions/render` and `/v1/completions/render`: a request as other engines take it.

Renderers do it, without an engine; what is answered here can be sent to `/inference/v1/generate` of
any server of the model, and to ours.
"""

import asyncio
import secrets
from typing import Literal

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.protocol.messages import GenerateRequest
from workers.gateway.app import AppContext, Json
from workers.gateway.core.field_names import translated_errors
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.http.errors import UnsupportedParameter
from workers.gateway.openai.chat import plan_chat
from workers.gateway.openai.completions import plan_completion
from workers.gateway.routes.vllm_common import Payload, VllmRoutes
from workers.gateway.schemas import openai_request
from workers.gateway.schemas.generate import GenerateStreamOptions, RenderedRequest
from workers.gateway.vllm.errors import decode
from workers.gateway.vllm.render_response import num_to_answer, rendered_request, resolved


class RenderChat(openai_request.ChatRequest, frozen=True, forbid_unknown_fields=True, kw_only=True):
    request_id: str | None = None
    mm_payload: Payload | None = None
    return_mm_kwargs: bool | None = None
    """An old name: false for the payload `none`."""
    return_token_offsets: Literal[False] | None = None


class RenderCompletion(
    openai_request.CompletionRequest, frozen=True, forbid_unknown_fields=True, kw_only=True
):
    """The same fields: Structs have one base."""

    request_id: str | None = None
    mm_payload: Payload | None = None
    return_mm_kwargs: bool | None = None
    return_token_offsets: Literal[False] | None = None


Asked = RenderChat | RenderCompletion

# Known to renderers, and not done by ours.
UNSUPPORTED = openai_request.UNSUPPORTED | {"return_token_offsets"}

_chat = msgspec.json.Decoder(RenderChat).decode
_completion = msgspec.json.Decoder(RenderCompletion).decode


def routes(context: AppContext) -> list[Route]:
    if not context.limits.scale_out:
        return []
    renderer = _Renderer(VllmRoutes(context))
    return [
        renderer.routes.post("/v1/chat/completions/render", renderer.chat, counted=True),
        renderer.routes.post("/v1/completions/render", renderer.completion, counted=True),
    ]


class _Renderer:
    def __init__(self, vllm_routes: VllmRoutes) -> None:
        self.routes = vllm_routes

    async def chat(self, request: Request, caller: Caller) -> Response:
        asked = decode(await self.routes.read(request), _chat, UNSUPPORTED)
        model = self.routes.model(asked.model)
        card = await self.routes.context.model_card(model) if asked.tools else None
        # Other engines read other grammars.
        order = plan_chat(asked, card, strict=False)
        wire_id = f"chatcmpl-{_base_id(request, asked)}"
        return Json(await self._render(order.requests[0], wire_id, asked, order, caller))

    async def completion(self, request: Request, caller: Caller) -> Response:
        asked = decode(await self.routes.read(request), _completion, UNSUPPORTED)
        self.routes.model(asked.model)
        if asked.echo:
            raise UnsupportedParameter("echo: what is rendered begins no answer", field="echo")
        order = plan_completion(asked)
        wire_id, alone = f"cmpl-{_base_id(request, asked)}", len(order.requests) == 1
        wire_ids = [wire_id if alone else f"{wire_id}-{i}" for i in range(len(order.requests))]
        rendered = await asyncio.gather(
            *(
                self._render(one, its_id, asked, order, caller)
                for one, its_id in zip(order.requests, wire_ids, strict=True)
            )
        )
        return Json(rendered)

    async def _render(
        self,
        request: GenerateRequest,
        wire_id: str,
        asked: Asked,
        order: SubmitPlan,
        caller: Caller,
    ) -> RenderedRequest:
        model, payload = request.model, _payload_of(asked)
        defaults = self.routes.context.config.models[model].sampling_defaults
        kind = "completion" if isinstance(asked, RenderCompletion) else "chat"
        with translated_errors(kind, order.options):
            sampling = resolved(defaults, order.sampling)
            card, rendered = await asyncio.gather(
                self.routes.context.model_card(model),
                self.routes.features_of(request, payload, caller),
            )
            num_prompt = len(rendered.prompt_token_ids)
            max_tokens = num_to_answer(sampling.max_tokens, num_prompt, card.max_model_len)
        return rendered_request(
            wire_id,
            rendered,
            sampling,
            max_tokens,
            model=model,
            with_tensors=payload == "tensors",
            stream=bool(asked.stream),
            stream_options=_stream_options(asked),
            cache_salt=asked.cache_salt,
            priority=asked.priority or 0,
        )


def _base_id(request: Request, asked: Asked) -> str:
    return request.headers.get("x-request-id") or asked.request_id or secrets.token_hex(8)


def _payload_of(asked: Asked) -> Payload:
    if asked.mm_payload is not None:
        return asked.mm_payload
    return "none" if asked.return_mm_kwargs is False else "tensors"


def _stream_options(asked: Asked) -> GenerateStreamOptions | None:
    options = asked.stream_options
    if options is None:
        return None
    return GenerateStreamOptions(
        include_usage=options.include_usage,
        continuous_usage_stats=options.continuous_usage_stats,
    )
