"""`/v1/chat/completions/derender` and `/v1/completions/derender`: text from another's tokens.

Renderers say what tokens spell; nothing is kept here from one event of a stream to the next.
"""

import asyncio
from typing import Any

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from shared.protocol.detokenizer import (
    EMPTY_WINDOW,
    MAX_CONTEXT_TOKENS,
    Decoding,
    TokenWindow,
    read_text,
)
from workers.gateway.app import AppContext, Json
from workers.gateway.http.auth import Caller
from workers.gateway.routes.vllm_common import VllmRoutes
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
from workers.gateway.vllm.derender_tools import Looks, Read, looks_of
from workers.gateway.vllm.errors import decode, wrong


class _Which(Struct):
    stream: bool = False


_which = msgspec.json.Decoder(_Which).decode
_chat = msgspec.json.Decoder(DerenderChat).decode
_chat_stream = msgspec.json.Decoder(DerenderChatStream).decode
_completion = msgspec.json.Decoder(DerenderCompletion).decode
_completion_stream = msgspec.json.Decoder(DerenderCompletionStream).decode


def routes(context: AppContext) -> list[Route]:
    if not context.limits.scale_out:
        return []
    vllm_routes = VllmRoutes(context)

    async def chat(request: Request, caller: Caller) -> Response:
        return await _Derenderer(vllm_routes, caller.tenant).chat(request)

    async def completion(request: Request, caller: Caller) -> Response:
        return await _Derenderer(vllm_routes, caller.tenant).completion(request)

    return [
        vllm_routes.post("/v1/chat/completions/derender", chat, counted=True),
        vllm_routes.post("/v1/completions/derender", completion, counted=True),
    ]


class _Derenderer:
    """Of one request, whose questions are those of its tenant."""

    def __init__(self, vllm_routes: VllmRoutes, tenant: str) -> None:
        self.routes = vllm_routes
        self._tenant = tenant

    async def chat(self, request: Request) -> Response:
        data = await self.routes.read(request)
        if decode(data, _which).stream:
            return Json(await self._chat_event(decode(data, _chat_stream)))
        return Json(await self._chat_answer(decode(data, _chat)))

    async def completion(self, request: Request) -> Response:
        data = await self.routes.read(request)
        if decode(data, _which).stream:
            return Json(await self._completion_event(decode(data, _completion_stream)))
        return Json(await self._completion_answer(decode(data, _completion)))

    async def _chat_answer(self, asked: DerenderChat) -> DerenderChatResponse:
        model, answer = self.routes.model(asked.model), asked.generate_response
        max_len = await self._max_len(model)
        derender.check_sizes([answer], max_len)
        derender.check_prompt(asked.prompt_token_ids, max_len)
        prompt = asked.prompt_token_ids or answer.prompt_token_ids
        looks = await self._looks(model, asked.chat_request)
        found = await self._read_all(model, answer, prompt, looks.skips_special)
        return DerenderChatResponse(
            id=answer.request_id,
            created=self._now_s(),
            model=model,
            choices=[
                await asyncio.to_thread(looks.whole, answer.request_id, choice, read)
                for choice, read in zip(answer.choices, found, strict=True)
            ],
            usage=derender.usage_of_answers([answer], asked.prompt_tokens or 0),
            prompt_logprobs=answer.prompt_logprobs,
            kv_transfer_params=answer.kv_transfer_params,
            metrics=answer.metrics,
        )

    async def _completion_answer(self, asked: DerenderCompletion) -> DerenderCompletionResponse:
        model, answers = self.routes.model(asked.model), asked.generate_responses
        if not answers:
            raise wrong("generate_responses", "generate_responses must not be empty")
        for name in ("prompt_tokens", "prompt_token_ids"):
            told = getattr(asked, name)
            if told is not None and len(told) != len(answers):
                raise wrong(name, f"{name} length ({len(told)}) must equal {len(answers)}")
        max_len = await self._max_len(model)
        derender.check_sizes(answers, max_len)
        prompts = asked.prompt_token_ids or [None] * len(answers)
        for prompt in prompts:
            derender.check_prompt(prompt, max_len)
        skip = _skips_special(asked.completion_request)
        found = await asyncio.gather(
            *(
                self._read_all(model, answer, prompt or answer.prompt_token_ids, skip)
                for answer, prompt in zip(answers, prompts, strict=True)
            )
        )
        pairs = [
            (choice, read)
            for answer, reads in zip(answers, found, strict=True)
            for choice, read in zip(answer.choices, reads, strict=True)
        ]
        return DerenderCompletionResponse(
            id=answers[0].request_id,
            created=self._now_s(),
            model=model,
            choices=[
                DerenderCompletionChoice(
                    index=index,
                    text=read.text,
                    logprobs=derender.flat_logprobs(read.logprobs, 0),
                    finish_reason=choice.finish_reason,
                    stop_reason=choice.stop_reason,
                )
                for index, (choice, read) in enumerate(pairs)
            ],
            usage=derender.usage_of_answers(answers, sum(asked.prompt_tokens or [])),
            metrics=answers[0].metrics if len(answers) == 1 else None,
        )

    async def _chat_event(self, asked: DerenderChatStream) -> StreamAnswer:
        model, event = self.routes.model(asked.model), asked.generate_chunk
        looks = await self._looks(model, asked.chat_request)
        read, state = await self._read_event(model, asked, looks.skips_special)
        before = asked.stream_state or StreamState()
        # All the text so far is read again.
        choices = [
            await asyncio.to_thread(looks.event, event.request_id, choice, read, before)
            for choice in event.choices
        ]
        return StreamAnswer(
            chunk=DerenderChatChunk(
                id=event.request_id,
                created=self._now_s(),
                model=model,
                choices=choices,
                usage=derender.usage_of_event(event, asked.prompt_tokens),
                metrics=event.metrics,
            ),
            stream_state=looks.carried(before, state, read),
        )

    async def _completion_event(self, asked: DerenderCompletionStream) -> StreamAnswer:
        model, event = self.routes.model(asked.model), asked.generate_chunk
        read, state = await self._read_event(model, asked, _skips_special(asked.completion_request))
        offset = 0 if asked.stream_state is None else asked.stream_state.text_offset
        return StreamAnswer(
            chunk=DerenderCompletionChunk(
                id=event.request_id,
                created=self._now_s(),
                model=model,
                choices=[
                    DerenderCompletionStreamChoice(
                        index=choice.index,
                        text=read.text,
                        logprobs=derender.flat_logprobs(read.logprobs, offset),
                        finish_reason=choice.finish_reason,
                        stop_reason=choice.stop_reason,
                    )
                    for choice in event.choices
                ],
                usage=derender.usage_of_event(event, asked.prompt_tokens),
                metrics=event.metrics,
            ),
            stream_state=state,
        )

    async def _read_all(
        self, model: str, answer: Generated, prompt: list[int] | None, skip: bool
    ) -> list[Read]:
        """The choices of an answer, which all go on from the same prompt."""
        opened = await self._open(model, prompt, skip)

        async def read_one(choice: GeneratedChoice) -> Read:
            token_ids = derender.whole_tokens(answer, choice)
            new, _ = await self._read_text(model, opened, token_ids, skip, is_last=True)
            return Read(new, await self._logprobs(model, choice, []), token_ids)

        return await asyncio.gather(*(read_one(choice) for choice in answer.choices))

    async def _read_event(
        self, model: str, asked: DerenderChatStream | DerenderCompletionStream, skip: bool
    ) -> tuple[Read, StreamState]:
        event, state = asked.generate_chunk, asked.stream_state or StreamState()
        choice = derender.only_choice(event)
        max_len = await self._max_len(model)
        derender.check_prompt(asked.prompt_token_ids, max_len)
        derender.check_sizes([event], max_len)
        num_held = min(state.num_held, len(state.token_ids))
        before = TokenWindow(state.token_ids, state.num_out, num_held)
        if asked.stream_state is None:
            prompt = asked.prompt_token_ids or event.prompt_token_ids
            before = await self._open(model, prompt, skip)
        if choice is None:
            return Read("", None, []), derender.with_window(state, before)
        token_ids = choice.token_ids or []
        is_last = choice.finish_reason is not None
        (new, after), logprobs = await asyncio.gather(
            self._read_text(model, before, token_ids, skip, is_last=is_last),
            self._logprobs(model, choice, state.context),
        )
        return Read(new, logprobs, token_ids), derender.advanced(state, after, token_ids, new)

    async def _looks(self, model: str, request: dict[str, Any] | None) -> Looks:
        if request is None:
            return Looks()
        card = await self.routes.context.model_card(model) if request.get("tools") else None
        return looks_of(model, request, card)

    async def _open(self, model: str, prompt: list[int] | None, skip: bool) -> TokenWindow:
        """Return the window that an answer to this prompt begins with."""
        end = (prompt or [])[-MAX_CONTEXT_TOKENS:]
        return (await self._read_text(model, EMPTY_WINDOW, end, skip))[1]

    async def _read_text(
        self,
        model: str,
        window: TokenWindow,
        token_ids: list[int],
        skip: bool,
        *,
        is_last: bool = False,
    ) -> tuple[str, TokenWindow]:
        steps: Decoding = read_text(window, token_ids, is_last=is_last)
        try:
            wanted = next(steps)
            while True:
                wanted = steps.send(await self._text(model, wanted, skip))
        except StopIteration as done:
            new: tuple[str, TokenWindow] = done.value
            return new

    async def _text(self, model: str, token_ids: list[int], skip: bool) -> str:
        return await self.routes.text_of(model, token_ids, skip, self._tenant)

    async def _logprobs(
        self, model: str, choice: GeneratedChoice, context: list[int]
    ) -> TextContent | None:
        named = derender.named_tokens(choice, context)
        spelling = await self.routes.spelling_of(model, named, self._tenant)
        return derender.logprobs_of(choice, context, spelling)

    async def _max_len(self, model: str) -> int:
        return (await self.routes.context.model_card(model)).max_model_len

    def _now_s(self) -> int:
        return int(self.routes.context.bus.now_ms() / 1000)


def _skips_special(request: dict[str, Any] | None) -> bool:
    told = (request or {}).get("skip_special_tokens")
    return told is None or bool(told)
