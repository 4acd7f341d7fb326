"""`/inference/v1/generate` and `/inference/v1/abort_requests`: tokens in, tokens out."""

import asyncio
import secrets
from dataclasses import replace
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared import client
from shared.errors import ContextTooLong, InvalidRequest, NotFound
from shared.protocol import subjects
from shared.protocol.messages import Feature, GenerateRequest, Message, RequestRecord, to_json
from shared.protocol.multimodal import IMAGE
from shared.protocol.renderer_rpc import ModelCard
from shared.state import request_registry
from workers.gateway.app import AppContext
from workers.gateway.backend.submit import submit
from workers.gateway.core.assembler import TokenBytes
from workers.gateway.core.field_names import translated_errors
from workers.gateway.core.ids import named_request_id, read_request_id
from workers.gateway.core.plan import SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.routes.vllm_common import VllmRoutes, refusal
from workers.gateway.vllm.content_parts import pictures_of, placed
from workers.gateway.vllm.errors import decode
from workers.gateway.vllm.features import WireItem
from workers.gateway.vllm.generate_assembler import GenerateAssembler, GenerateShape
from workers.gateway.vllm.generate_request import Parsed, parse, shape_of

KIND: Literal["generate"] = "generate"
PREFIX = "generate-tokens-"
_ALIAS = "alias_of"


class AbortBody(Struct, frozen=True, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], Meta(max_length=1024)]


_abort = msgspec.json.Decoder(AbortBody).decode


def routes(context: AppContext) -> list[Route]:
    context.assemblers[KIND] = _assembler
    if not context.limits.scale_out:
        return []
    generator = _Generator(VllmRoutes(context))
    vllm_routes = generator.routes
    return [
        vllm_routes.post("/inference/v1/generate", generator.generate, counted=True),
        vllm_routes.post("/inference/v1/abort_requests", generator.abort),
    ]


def _assembler(request_id: str, record: RequestRecord, spelling: TokenBytes) -> GenerateAssembler:
    if _ALIAS in record.options:
        raise NotFound("there is no such request, or not any more", field="id")
    shape = msgspec.convert(record.options, GenerateShape)
    return GenerateAssembler(shape, record.model, record.created_s, spelling)


class _Generator:
    def __init__(self, vllm_routes: VllmRoutes) -> None:
        self.routes = vllm_routes

    async def generate(self, request: Request, caller: Caller) -> Response:
        data = await self.routes.read(request)
        parsed = parse(data)
        model, context = self.routes.model(parsed.body.model), self.routes.context
        if parsed.body.content_parts:
            parsed = await self._processed(parsed, parsed.body.content_parts, model, caller)
        body = parsed.body
        check_room(parsed, await context.model_card(model))
        features = await asyncio.gather(*(self._feature(i, caller.tenant) for i in parsed.items))
        asked = GenerateRequest(
            model=model,
            prompt_token_ids=body.token_ids,
            features=list(features),
            cache_salt=body.cache_salt,
        )
        given = request.headers.get("x-request-id")
        name = given or body.request_id or secrets.token_hex(16)
        request_id, named = read_request_id(request, KIND, caller.tenant)
        if given is None:
            await self._name(name, request_id, model, caller.tenant)
        options = msgspec.to_builtins(shape_of(parsed, PREFIX + name))
        return await submit(
            context,
            request,
            caller,
            KIND,
            SubmitPlan([asked], parsed.sampling, options),
            stream=bool(body.stream),
            durable=False,
            known_as=(request_id, named),
            refuse=refusal,
        )

    async def abort(self, request: Request, caller: Caller) -> Response:
        """Of requests that are not known, or have ended, nothing is said: as in the protocol."""
        asked = decode(await self.routes.read(request), _abort)
        await asyncio.gather(*(self._abort(name, caller.tenant) for name in asked.request_ids))
        return Response(status_code=200)

    async def _processed(
        self, parsed: Parsed, parts: list[dict[str, Any]], model: str, caller: Caller
    ) -> Parsed:
        """With pictures as a renderer has processed them."""
        shown = GenerateRequest(model, [Message("user", list(pictures_of(parts)))])
        with translated_errors(KIND, {"fields": {"messages": "content_parts"}}):
            rendered = await self.routes.features_of(shown, "tensors", caller)
        token_ids, items = placed(parsed.body.token_ids, rendered)
        return replace(parsed, body=structs.replace(parsed.body, token_ids=token_ids), items=items)

    async def _feature(self, item: WireItem, tenant: str) -> Feature:
        stored = None
        if item.data is not None:
            stored = await client.pin_media(self.routes.context.bus, item.data, tenant)
        return Feature(IMAGE, item.mm_hash, item.place.offset, item.place.length, stored)

    async def _name(self, name: str, request_id: str, model: str, tenant: str) -> None:
        """Note which request goes by a name of the body, which may have been another's before."""
        bus = self.routes.context.bus
        now_s = int(bus.now_ms() / 1000)
        alias = RequestRecord(KIND, model, tenant, now_s, False, {_ALIAS: request_id})
        await bus.publish_without_id(subjects.job(_alias_of(name, tenant)), to_json(alias))

    async def _abort(self, name: str, tenant: str) -> None:
        bus, name = self.routes.context.bus, name.removeprefix(PREFIX)
        alias = await request_registry.find(bus, _alias_of(name, tenant))
        request_id = (
            named_request_id(KIND, tenant, name) if alias is None else alias.options[_ALIAS]
        )
        if await request_registry.find(bus, request_id) is not None:
            await client.cancel(bus, request_id)


def _alias_of(name: str, tenant: str) -> str:
    return named_request_id(KIND, tenant, f"{_ALIAS}:{name}")


def check_room(parsed: Parsed, card: ModelCard) -> None:
    """Raises a RequestError for tokens that the model does not have, or more than it can take."""
    token_ids, max_len = parsed.body.token_ids, card.max_model_len
    outside = next((t for t in token_ids if t >= card.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"Token id {outside} is out of vocabulary")
    if len(token_ids) > max_len:
        raise ContextTooLong(
            f"The decoder prompt (length {len(token_ids)}) is longer than the maximum model length"
            f" of {max_len}."
        )
    asked = parsed.sampling.get("max_tokens")
    if asked is not None and len(token_ids) + asked > max_len:
        raise ContextTooLong(
            f"max_tokens: {len(token_ids)} tokens of the prompt and {asked} of the answer are over"
            f" the maximum model length of {max_len}",
            field="max_tokens",
        )
