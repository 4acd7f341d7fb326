"""`/v1/chat/completions/derender` and `/v1/completions/derender`: completions of tokens that
another server generated.

Renderers decode the tokens. Gateways are stateless: the client carries the state of a stream from
one event to the next.
"""

import asyncio
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from shared.protocol.detokenizer import EMPTY_WINDOW, MAX_CONTEXT_TOKENS, TokenWindow, read_text
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.route_table import RENDERER_ERRORS, SCALE_OUT
from workers.gateway.routes.vllm_common import (
    decode_tokens,
    load_token_bytes,
    read_body,
    resolve_model,
    vllm_route_table,
)
from workers.gateway.schemas.generate import TextContent
from workers.gateway.vllm import derender
from workers.gateway.vllm.derender_schema import (
    DerenderChat,
    DerenderChatChunk,
    DerenderChatResponse,
    DerenderChatStream,
    DerenderCompletion,
    DerenderCompletionChoice,
    DerenderCompletionChunk,
    DerenderCompletionResponse,
    DerenderCompletionStream,
    DerenderCompletionStreamChoice,
    Generated,
    GeneratedChoice,
    StreamAnswer,
    StreamState,
)
from workers.gateway.vllm.derender_tools import ChatFormat, ChoiceText, chat_format_of
from workers.gateway.vllm.errors import body_error, decode

ROUTES = vllm_route_table(SCALE_OUT)


class _StreamFlag(Struct):
    stream: bool = False


_stream_flag = msgspec.json.Decoder(_StreamFlag).decode
_chat = msgspec.json.Decoder(DerenderChat).decode
_chat_stream = msgspec.json.Decoder(DerenderChatStream).decode
_completion = msgspec.json.Decoder(DerenderCompletion).decode
_completion_stream = msgspec.json.Decoder(DerenderCompletionStream).decode


@ROUTES.endpoint(
    "POST",
    "/v1/chat/completions/derender",
    "The chat completion of a response of generate; of a stream, event by event",
    answer=DerenderChatResponse | StreamAnswer,
    body=DerenderChat | DerenderChatStream,
    refuses=RENDERER_ERRORS,
    counted=True,
)
async def chat(context: AppContext, request: Request, caller: Caller) -> Response:
    data = await read_body(context, request)
    derenderer = _Derenderer(context, caller.tenant)
    if decode(data, _stream_flag).stream:
        return Json(await derenderer.chat_event(decode(data, _chat_stream)))
    return Json(await derenderer.chat_answer(decode(data, _chat)))


@ROUTES.endpoint(
    "POST",
    "/v1/completions/derender",
    "The same for completions",
    answer=DerenderCompletionResponse | StreamAnswer,
    body=DerenderCompletion | DerenderCompletionStream,
    refuses=RENDERER_ERRORS,
    counted=True,
)
async def completion(context: AppContext, request: Request, caller: Caller) -> Response:
    data = await read_body(context, request)
    derenderer = _Derenderer(context, caller.tenant)
    if decode(data, _stream_flag).stream:
        return Json(await derenderer.completion_event(decode(data, _completion_stream)))
    return Json(await derenderer.completion_answer(decode(data, _completion)))


class _Derenderer:
    """One request, whose questions to renderers are those of its tenant."""

    def __init__(self, context: AppContext, tenant: str) -> None:
        self._context = context
        self._tenant = tenant

    async def chat_answer(self, asked: DerenderChat) -> DerenderChatResponse:
        model, answer = resolve_model(self._context, asked.model), asked.generate_response
        max_len = await self._max_len(model)
        derender.check_sizes([answer], max_len)
        derender.check_prompt(asked.prompt_token_ids, max_len)
        prompt = asked.prompt_token_ids or answer.prompt_token_ids
        chat_format = await self._chat_format(model, asked.chat_request)
        texts = await self._read_choices(model, answer, prompt, chat_format.skips_special)
        return DerenderChatResponse(
            id=answer.request_id,
            created=self._now_s(),
            model=model,
            choices=[
                await asyncio.to_thread(chat_format.answer, answer.request_id, choice, text)
                for choice, text in zip(answer.choices, texts, strict=True)
            ],
            usage=derender.usage_of_answers([answer], asked.prompt_tokens or 0),
            prompt_logprobs=answer.prompt_logprobs,
            kv_transfer_params=answer.kv_transfer_params,
            metrics=answer.metrics,
        )

    async def completion_answer(self, asked: DerenderCompletion) -> DerenderCompletionResponse:
        model, answers = resolve_model(self._context, asked.model), asked.generate_responses
        if not answers:
            raise body_error("generate_responses", "generate_responses must not be empty")
        for name in ("prompt_tokens", "prompt_token_ids"):
            given = getattr(asked, name)
            if given is not None and len(given) != len(answers):
                raise body_error(name, f"{name} length ({len(given)}) must equal {len(answers)}")
        max_len = await self._max_len(model)
        derender.check_sizes(answers, max_len)
        prompts = asked.prompt_token_ids or [None] * len(answers)
        for prompt in prompts:
            derender.check_prompt(prompt, max_len)
        skip = _skips_special(asked.completion_request)
        texts_of_answers = await asyncio.gather(
            *(
                self._read_choices(model, answer, prompt or answer.prompt_token_ids, skip)
                for answer, prompt in zip(answers, prompts, strict=True)
            )
        )
        pairs = [
            (choice, text)
            for answer, texts in zip(answers, texts_of_answers, strict=True)
            for choice, text in zip(answer.choices, texts, strict=True)
        ]
        return DerenderCompletionResponse(
            id=answers[0].request_id,
            created=self._now_s(),
            model=model,
            choices=[
                DerenderCompletionChoice(
                    index=index,
                    text=text.text,
                    logprobs=derender.flat_logprobs(text.logprobs, 0),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for index, (choice, text) in enumerate(pairs)
            ],
            usage=derender.usage_of_answers(answers, sum(asked.prompt_tokens or [])),
            metrics=answers[0].metrics if len(answers) == 1 else None,
        )

    async def chat_event(self, asked: DerenderChatStream) -> StreamAnswer:
        model, event = resolve_model(self._context, asked.model), asked.generate_chunk
        chat_format = await self._chat_format(model, asked.chat_request)
        text, state = await self._read_event(model, asked, chat_format.skips_special)
        before = asked.stream_state or StreamState()
        # In a thread, because all the text so far is parsed again.
        choices = [
            await asyncio.to_thread(chat_format.event, event.request_id, choice, text, before)
            for choice in event.choices
        ]
        chunk = DerenderChatChunk(
            id=event.request_id,
            created=self._now_s(),
            model=model,
            choices=choices,
            usage=derender.usage_of_event(event, asked.prompt_tokens),
            metrics=event.metrics,
        )
        return StreamAnswer(chunk=chunk, stream_state=chat_format.with_text(before, state, text))

    async def completion_event(self, asked: DerenderCompletionStream) -> StreamAnswer:
        model, event = resolve_model(self._context, asked.model), asked.generate_chunk
        text, state = await self._read_event(model, asked, _skips_special(asked.completion_request))
        offset = 0 if asked.stream_state is None else asked.stream_state.text_offset
        choices = [
            DerenderCompletionStreamChoice(
                index=choice.index,
                text=text.text,
                logprobs=derender.flat_logprobs(text.logprobs, offset),
                finish_reason=choice.finish_reason,
                stop_reason=choice.stop_reason,
            )
            for choice in event.choices
        ]
        chunk = DerenderCompletionChunk(
            id=event.request_id,
            created=self._now_s(),
            model=model,
            choices=choices,
            usage=derender.usage_of_event(event, asked.prompt_tokens),
            metrics=event.metrics,
        )
        return StreamAnswer(chunk=chunk, stream_state=state)

    async def _read_choices(
        self, model: str, answer: Generated, prompt: list[int] | None, skip: bool
    ) -> list[ChoiceText]:
        """Read the choices of an answer, which all continue the same prompt."""
        window = await self._read_prompt(model, prompt, skip)

        async def read_one(choice: GeneratedChoice) -> ChoiceText:
            token_ids = derender.whole_tokens(answer, choice)
            text, _ = await self._read_text(model, window, token_ids, skip, is_last=True)
            return ChoiceText(text, await self._logprobs(model, choice, []), token_ids)

        return await asyncio.gather(*(read_one(choice) for choice in answer.choices))

    async def _read_event(
        self, model: str, asked: DerenderChatStream | DerenderCompletionStream, skip: bool
    ) -> tuple[ChoiceText, StreamState]:
        """Return the text that an event adds, and the state after it."""
        event, state = asked.generate_chunk, asked.stream_state or StreamState()
        choice = derender.only_choice(event)
        max_len = await self._max_len(model)
        derender.check_prompt(asked.prompt_token_ids, max_len)
        derender.check_sizes([event], max_len)
        window = derender.window_of(state)
        if asked.stream_state is None:
            prompt = asked.prompt_token_ids or event.prompt_token_ids
            window = await self._read_prompt(model, prompt, skip)
        if choice is None:
            return ChoiceText("", None, []), derender.with_window(state, window)
        token_ids, is_last = choice.token_ids or [], choice.finish_reason is not None
        (text, window), logprobs = await asyncio.gather(
            self._read_text(model, window, token_ids, skip, is_last=is_last),
            self._logprobs(model, choice, state.context),
        )
        after = derender.next_state(state, window, token_ids, text)
        return ChoiceText(text, logprobs, token_ids), after

    async def _chat_format(self, model: str, request: dict[str, Any] | None) -> ChatFormat:
        if request is None:
            return ChatFormat()
        card = await self._context.model_card(model) if request.get("tools") else None
        return chat_format_of(model, request, card)

    async def _read_prompt(self, model: str, prompt: list[int] | None, skip: bool) -> TokenWindow:
        """Return the window with which an answer to this prompt begins."""
        end = (prompt or [])[-MAX_CONTEXT_TOKENS:]
        _, window = await self._read_text(model, EMPTY_WINDOW, end, skip)
        return window

    async def _read_text(
        self,
        model: str,
        window: TokenWindow,
        token_ids: list[int],
        skip: bool,
        *,
        is_last: bool = False,
    ) -> tuple[str, TokenWindow]:
        steps = read_text(window, token_ids, is_last=is_last)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(
                    await decode_tokens(self._context, model, wanted, skip, self._tenant)
                )
        except StopIteration as done:
            result: tuple[str, TokenWindow] = done.value
            return result

    async def _logprobs(
        self, model: str, choice: GeneratedChoice, context: list[int]
    ) -> TextContent | None:
        token_ids = derender.logprob_token_ids(choice, context)
        token_bytes = await load_token_bytes(self._context, model, token_ids, self._tenant)
        return derender.logprobs_of(choice, context, token_bytes)

    async def _max_len(self, model: str) -> int:
        return (await self._context.model_card(model)).max_model_len

    def _now_s(self) -> int:
        return int(self._context.bus.now_ms() / 1000)


def _skips_special(request: dict[str, Any] | None) -> bool:
    given = (request or {}).get("skip_special_tokens")
    return given is None or bool(given)
