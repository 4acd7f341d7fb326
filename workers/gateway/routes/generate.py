"""`/inference/v1/generate` and `/inference/v1/abort_requests`: tokens in, tokens out."""

import asyncio
import secrets
from dataclasses import replace
from typing import Annotated, Any

from msgspec import Meta, Struct, structs
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import ContextTooLong, InvalidRequest, MMCacheMiss, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import RequestRecord
from shared.protocol.names import scoped_id
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.requests import Feature, GenerateRequest, Message, tenant_header
from shared.state import request_registry, request_status
from workers.gateway.app import AppContext
from workers.gateway.core.ids import named_request_id, part_ids, read_request_id
from workers.gateway.core.plan import Delivery, SubmitPlan
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import ANSWER_ERRORS, SCALE_OUT, STREAM_PARAMETERS, Call
from workers.gateway.routes.vllm_common import render_features, resolve_model, vllm_route_table
from workers.gateway.schemas.generate import GenerateChunk, GenerateResponse, RenderedRequest
from workers.gateway.vllm.errors import BODY
from workers.gateway.vllm.features import WireItem, images_of, insert_images
from workers.gateway.vllm.generate_assembler import GENERATE, GenerateShape
from workers.gateway.vllm.generate_request import ParsedRequest, parse, shape_of

ROUTES = vllm_route_table(SCALE_OUT)

PREFIX = "generate-tokens-"
_ALIAS = "alias_of"


class AbortBody(Struct, frozen=True, forbid_unknown_fields=True):
    request_ids: Annotated[list[str], Meta(max_length=1024)]


async def _read_request(call: Call) -> ParsedRequest:
    return parse(await call.context.bodies.decode(call.request, RenderedRequest, root=BODY))


@ROUTES.answer(
    GENERATE,
    "/inference/v1/generate",
    summary="Tokens and media of a rendered request in, tokens out",
    body=RenderedRequest,
    read=_read_request,
    answer=GenerateResponse,
    chunk=GenerateChunk,
    refuses=(*ANSWER_ERRORS, MMCacheMiss),
    parameters=STREAM_PARAMETERS,
    counted=True,
)
async def generate(call: Call, parsed: ParsedRequest) -> SubmitPlan[GenerateShape]:
    context, tenant = call.context, call.caller.tenant
    model = resolve_model(context, parsed.body.model)
    if parsed.body.content_parts:
        parsed = await _process_images(call, parsed, parsed.body.content_parts, model)
    body = parsed.body
    check_room(parsed, await context.model_card(model))
    features = await asyncio.gather(*(_store(context, i, tenant) for i in parsed.items))
    rendered = GenerateRequest(
        model=model,
        prompt_token_ids=body.token_ids,
        features=list(features),
        cache_salt=body.cache_salt,
    )
    header = call.request.headers.get("x-request-id")
    name = header or body.request_id or secrets.token_hex(8)
    if header is None:
        request_id, _ = read_request_id(call.request, GENERATE)
        await _record_alias(context, name, request_id, model, tenant)
    delivery = Delivery.EVENTS if body.stream else Delivery.WHOLE
    return SubmitPlan([rendered], parsed.sampling, shape_of(parsed, PREFIX + name), delivery)


@ROUTES.endpoint(
    "POST",
    "/inference/v1/abort_requests",
    "Cancel requests by their request_id; unknown ids are ignored",
    body=AbortBody,
    refuses=(Unavailable,),
)
async def abort(context: AppContext, request: Request, caller: Caller) -> Response:
    """Cancel requests. In vLLM's protocol, ids that are unknown or have ended are no error."""
    body = await context.bodies.decode(request, AbortBody, root=BODY)
    await asyncio.gather(*(_abort_one(context, name, caller.tenant) for name in body.request_ids))
    return Response(status_code=200)


async def _process_images(
    call: Call, parsed: ParsedRequest, parts: list[dict[str, Any]], model: str
) -> ParsedRequest:
    """Return the request with the images of its content parts, processed by a renderer."""
    message = Message("user", list(images_of(parts)))
    fields = GENERATE.client_fields.renamed({"messages": "content_parts"})
    with fields.translated(checks=True):
        rendered = await render_features(
            call.context, GenerateRequest(model, [message]), "tensors", call.caller
        )
    token_ids, items = insert_images(parsed.body.token_ids, rendered)
    return replace(parsed, body=structs.replace(parsed.body, token_ids=token_ids), items=items)


async def _store(context: AppContext, item: WireItem, tenant: str) -> Feature:
    url = None
    if item.data is not None:
        url = await context.pin_media(item.data, tenant)
    return Feature(item.modality, item.mm_hash, item.place.offset, item.place.length, url)


async def _record_alias(
    context: AppContext, name: str, request_id: str, model: str, tenant: str
) -> None:
    """Record the id of the request that a body has named. The last request of a name counts."""
    alias = RequestRecord(GENERATE.name, model, tenant, context.now_s, False, {_ALIAS: request_id})
    subject = subjects.job(_alias_of(name, tenant))
    await context.bus.publish_without_id(subject, to_json(alias), tenant_header(tenant))


async def _abort_one(context: AppContext, name: str, tenant: str) -> None:
    bus, name = context.bus, name.removeprefix(PREFIX)
    alias = await request_registry.find(bus, _alias_of(name, tenant))
    own_id = named_request_id(GENERATE, name) if alias is None else alias.options[_ALIAS]
    request_id = scoped_id(own_id, tenant)
    record = await request_registry.find(bus, request_id)
    if record is not None:
        await client.cancel_all(bus, part_ids(request_id, record))
    elif await request_status.is_used(bus, request_id):
        await client.cancel(bus, request_id)


def _alias_of(name: str, tenant: str) -> str:
    # No header has a space, so no request has this id.
    return scoped_id(named_request_id(GENERATE, f"{_ALIAS} {name}"), tenant)


def check_room(parsed: ParsedRequest, card: ModelCard) -> None:
    """Raises a RequestError for tokens that the model does not have, or for too many tokens."""
    token_ids, max_len = parsed.body.token_ids, card.max_model_len
    outside = next((t for t in token_ids if t >= card.vocab_size), None)
    if outside is not None:
        raise InvalidRequest(f"Token id {outside} is out of vocabulary")
    if len(token_ids) > max_len:
        raise ContextTooLong(
            f"The decoder prompt (length {len(token_ids)}) is longer than the maximum model length"
            f" of {max_len}."
        )
    max_tokens = parsed.sampling.get("max_tokens")
    if max_tokens is not None and len(token_ids) + max_tokens > max_len:
        raise ContextTooLong(
            f"max_tokens: {len(token_ids)} tokens of the prompt and {max_tokens} of the answer are"
            f" over the maximum model length of {max_len}",
            field="max_tokens",
        )
