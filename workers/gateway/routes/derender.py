"""`/v1/chat/completions/derender` and `/v1/completions/derender`: completions of tokens that
another server generated.

Renderers decode the tokens. Gateways are stateless: the client carries the state of a stream from
one event to the next.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from shared.protocol.detokenizer import EMPTY_WINDOW, MAX_CONTEXT_TOKENS, TokenWindow, read_text
from shared.protocol.renderer_rpc import ModelCard
from shared.protocol.value_limits import MAX_NUMBERS
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import RENDERER_ERRORS, SCALE_OUT
from workers.gateway.routes.vllm_common import (
    decode_tokens,
    read_body,
    resolve_model,
    vllm_route_table,
)
from workers.gateway.schemas.generate import TextContent
from workers.gateway.vllm import derender
from workers.gateway.vllm import derender_schema as schema
from workers.gateway.vllm.derender import ChatFormat, CompletionFormat, Decoded
from workers.gateway.vllm.derender_schema import Generated, GeneratedChoice, StreamState
from workers.gateway.vllm.errors import decode

ROUTES = vllm_route_table(SCALE_OUT, refuses=RENDERER_ERRORS, counted=True)

Whole = TypeVar("Whole")
Event = TypeVar("Event")


class _StreamFlag(Struct):
    stream: bool = False


@ROUTES.endpoint(
    "POST",
    "/v1/chat/completions/derender",
    "The chat completion of a response of generate; of a stream, event by event",
    answer=schema.DerenderChatResponse | schema.StreamAnswer,
    body=schema.DerenderChat | schema.DerenderChatStream,
)
async def chat(context: AppContext, request: Request, caller: Caller) -> Response:
    asked = await _read(context, request, schema.DerenderChat, schema.DerenderChatStream)
    model, given = resolve_model(context, asked.model), asked.chat_request or {}
    card = await context.model_card(model)
    derenderer = _Derenderer(
        context, caller.tenant, card, derender.chat_format_of(model, given, card)
    )
    if isinstance(asked, schema.DerenderStream):
        return Json(await derenderer.event(asked))
    answer = asked.generate_response
    return Json(
        schema.DerenderChatResponse(
            id=answer.request_id,
            created=context.now_s,
            model=model,
            choices=await derenderer.choices([answer], [asked.prompt_token_ids]),
            usage=derender.usage_of_answers([answer], asked.prompt_tokens or 0),
            prompt_logprobs=answer.prompt_logprobs,
            kv_transfer_params=answer.kv_transfer_params,
            metrics=answer.metrics,
        )
    )


@ROUTES.endpoint(
    "POST",
    "/v1/completions/derender",
    "The same for completions",
    answer=schema.DerenderCompletionResponse | schema.StreamAnswer,
    body=schema.DerenderCompletion | schema.DerenderCompletionStream,
)
async def completion(context: AppContext, request: Request, caller: Caller) -> Response:
    asked = await _read(
        context, request, schema.DerenderCompletion, schema.DerenderCompletionStream
    )
    model = resolve_model(context, asked.model)
    card = await context.model_card(model)
    completion_format = derender.completion_format_of(asked.completion_request or {})
    derenderer = _Derenderer(context, caller.tenant, card, completion_format)
    if isinstance(asked, schema.DerenderStream):
        return Json(await derenderer.event(asked))
    derender.check_lengths(asked)
    answers = asked.generate_responses
    choices = await derenderer.choices(answers, asked.prompt_token_ids or [None] * len(answers))
    return Json(
        schema.DerenderCompletionResponse(
            id=answers[0].request_id,
            created=context.now_s,
            model=model,
            choices=[msgspec.structs.replace(one, index=i) for i, one in enumerate(choices)],
            usage=derender.usage_of_answers(answers, sum(asked.prompt_tokens or [])),
            metrics=answers[0].metrics if len(answers) == 1 else None,
        )
    )


async def _read(
    context: AppContext, request: Request, whole: type[Whole], event: type[Event]
) -> Whole | Event:
    """Return the body, which is an event of a stream if its field `stream` is true."""
    data = await read_body(context, request)

    def read() -> Whole | Event:
        # Each token may have log probabilities of twenty others.
        if decode(data, _StreamFlag, max_values=MAX_NUMBERS).stream:
            return decode(data, event, max_values=MAX_NUMBERS)
        return decode(data, whole, max_values=MAX_NUMBERS)

    return await context.bodies.in_turn(request, read)


@dataclass(frozen=True, slots=True)
class _Derenderer:
    """One request, whose questions to renderers are those of its tenant."""

    context: AppContext
    tenant: str
    card: ModelCard
    format: ChatFormat | CompletionFormat

    async def choices(
        self, answers: Sequence[Generated], prompts: Sequence[list[int] | None]
    ) -> list[Any]:
        """Return the choices of all answers. The choices of an answer continue the same prompt."""
        derender.check_sizes(answers, prompts, self.card.max_model_len)
        windows = await asyncio.gather(
            *(
                self._read_prompt(prompt or answer.prompt_token_ids)
                for answer, prompt in zip(answers, prompts, strict=True)
            )
        )
        decoded = await asyncio.gather(
            *(
                self._decode(answer, choice, window)
                for answer, window in zip(answers, windows, strict=True)
                for choice in answer.choices
            )
        )
        return await self._format(decoded, None)

    async def event(self, asked: schema.DerenderStream) -> schema.StreamAnswer:
        event, state = asked.generate_chunk, asked.stream_state or StreamState()
        choice = derender.only_choice(event)
        derender.check_sizes([event], [asked.prompt_token_ids], self.card.max_model_len)
        window = derender.window_of(state)
        if asked.stream_state is None:
            window = await self._read_prompt(asked.prompt_token_ids or event.prompt_token_ids)
        text, choices = "", []
        if choice is not None:
            token_ids, is_last = choice.token_ids or [], choice.finish_reason is not None
            (text, window), logprobs = await asyncio.gather(
                self._read_text(window, token_ids, is_last=is_last),
                self._logprobs(choice, state.context),
            )
            new = Decoded(text, logprobs, token_ids)
            choices = await self._format([(event, choice, new)], state)
        chunk = self.format.chunk_type(
            id=event.request_id,
            created=self.context.now_s,
            model=self.card.model,
            choices=choices,
            usage=derender.usage_of_event(event, asked.prompt_tokens),
            metrics=event.metrics,
        )
        after = derender.next_state(state, window, choice, text)
        if self.format.keeps_text:
            after = msgspec.structs.replace(after, text=state.text + text)
        return schema.StreamAnswer(chunk=chunk, stream_state=after)

    async def _decode(
        self, answer: Generated, choice: GeneratedChoice, window: TokenWindow
    ) -> tuple[Generated, GeneratedChoice, Decoded]:
        token_ids = derender.whole_tokens(answer, choice)
        text, _ = await self._read_text(window, token_ids, is_last=True)
        return answer, choice, Decoded(text, await self._logprobs(choice, []), token_ids)

    async def _format(
        self,
        decoded: Sequence[tuple[Generated, GeneratedChoice, Decoded]],
        before: StreamState | None,
    ) -> list[Any]:
        """Format choices in one thread: all text so far is parsed again, and more threads would
        take the GIL from the event loop."""

        def format_all() -> list[Any]:
            return [
                self.format.choice(answer.request_id, choice, new, before)
                for answer, choice, new in decoded
            ]

        return await asyncio.to_thread(format_all)

    async def _read_prompt(self, prompt: list[int] | None) -> TokenWindow:
        """Return the window with which an answer to this prompt begins."""
        _, window = await self._read_text(EMPTY_WINDOW, (prompt or [])[-MAX_CONTEXT_TOKENS:])
        return window

    async def _read_text(
        self, window: TokenWindow, token_ids: list[int], *, is_last: bool = False
    ) -> tuple[str, TokenWindow]:
        steps, skip = read_text(window, token_ids, is_last=is_last), self.format.skips_special
        try:
            wanted = next(steps)
            while True:
                text = await decode_tokens(self.context, self.card.model, wanted, skip, self.tenant)
                wanted = steps.send(text)
        except StopIteration as done:
            result: tuple[str, TokenWindow] = done.value
            return result

    async def _logprobs(self, choice: GeneratedChoice, context: list[int]) -> TextContent | None:
        token_ids, cache = derender.logprob_token_ids(choice, context), self.context.token_bytes
        await cache.load(self.card.model, token_ids, self.tenant)
        return derender.logprobs_of(choice, context, cache.of(self.card.model))
