"""`/tokenize` and `/detokenize`: the token ids of text, and the text of token ids."""

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from shared import client
from shared.errors import InvalidRequest
from shared.protocol.encoding import JsonObject
from shared.protocol.renderer_rpc import DetokenizeRequest, TokenizeRequest
from shared.protocol.requests import Tool
from shared.protocol.sampling import TokenId
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.openai.chat import messages_of
from workers.gateway.openai.chat_assembler import CHAT
from workers.gateway.route_table import RENDERER_ERRORS
from workers.gateway.routes.vllm_common import resolve_model, vllm_route_table
from workers.gateway.schemas.openai_request import ChatMessage, ProcessorKwargs
from workers.gateway.vllm.errors import BODY

ROUTES = vllm_route_table("Tokens", refuses=RENDERER_ERRORS, counted=True)

UNSUPPORTED = frozenset({"chat_template", "media_io_kwargs", "mm_processor_kwargs"})


class TokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Either a `prompt`, or `messages` and the fields that go with them."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1, max_length=1024)] | None = None
    add_special_tokens: bool | None = None
    """Default: true for a prompt. For messages, only if the chat template does not add them."""
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: JsonObject | None = None
    tools: Annotated[list[Tool], Meta(max_length=128)] | None = None
    chat_template: None = None
    media_io_kwargs: None = None
    mm_processor_kwargs: ProcessorKwargs | None = None


class TokenizeAnswer(Struct, frozen=True):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class DetokenizeBody(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    model: str | None = None
    tokens: list[TokenId]


class DetokenizeAnswer(Struct, frozen=True):
    prompt: str


@ROUTES.endpoint(
    "POST",
    "/tokenize",
    "The tokens of a text, or of a conversation",
    answer=TokenizeAnswer,
    body=TokenizeBody,
)
async def tokenize(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, TokenizeBody, UNSUPPORTED, BODY)
    model = resolve_model(context, body.model)
    question = renderer_request_of(body)
    with CHAT.client_fields.translated():
        tokenized = await client.tokenize(context.bus, model, question, tenant=caller.tenant)
    strings = tokenized.token_strs if body.return_token_strs else None
    return Json(
        TokenizeAnswer(tokenized.count, tokenized.max_model_len, tokenized.token_ids, strings)
    )


@ROUTES.endpoint(
    "POST", "/detokenize", "The text of tokens", answer=DetokenizeAnswer, body=DetokenizeBody
)
async def detokenize(context: AppContext, request: Request, caller: Caller) -> Response:
    body = await context.bodies.decode(request, DetokenizeBody, root=BODY)
    model = resolve_model(context, body.model)
    if not body.tokens:
        return Json(DetokenizeAnswer(""))
    question = DetokenizeRequest(body.tokens, skip_special_tokens=False)
    reply = await client.detokenize(context.bus, model, question, tenant=caller.tenant)
    return Json(DetokenizeAnswer(reply.prompt))


def renderer_request_of(body: TokenizeBody) -> TokenizeRequest:
    """Return the request for a renderer. Raises a RequestError."""
    _check(body)
    if body.messages is None:
        return TokenizeRequest(prompt=body.prompt, add_special_tokens=body.add_special_tokens)
    kwargs = dict(body.chat_template_kwargs or {})
    continues = bool(body.continue_final_message)
    if continues:
        kwargs["continue_final_message"] = True
    generates = body.add_generation_prompt
    return TokenizeRequest(
        messages=messages_of(body.messages, body.mm_processor_kwargs),
        tools=body.tools or [],
        template_kwargs=kwargs,
        add_generation_prompt=not continues if generates is None else generates,
        add_special_tokens=body.add_special_tokens,
    )


def _check(body: TokenizeBody) -> None:
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequest("give either prompt or messages", field="body")
    if body.continue_final_message and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            field="body.continue_final_message",
        )
    message_fields = ("add_generation_prompt", "continue_final_message", "chat_template_kwargs")
    for name in (*message_fields, "tools"):
        if body.messages is None and getattr(body, name):
            raise InvalidRequest(f"{name} can only be given with messages", field=f"body.{name}")
