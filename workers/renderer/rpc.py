"""Renderer RPC: calls that renderers answer directly, such as rendering or tokenizing a prompt.

Calls share the threads with work for engines, but use at most half of them, and calls beyond a
limit are refused at once, so that rendering for answers does not wait for token counts. Recordings
are split in the processes that decode media, with separate slots. Tenants take turns, and under
overload the tenant with the most calls is refused.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial

from shared.bus.bus import Bus
from shared.bus.messaging import GroupResponder
from shared.codec import envelope
from shared.config.schema import Config
from shared.errors import InvalidRequest
from shared.protocol import subjects
from shared.protocol.encoding import to_json, to_msgpack
from shared.protocol.prompts import prompt_of, prompt_to_tokenize
from shared.protocol.renderer_rpc import (
    Detokenized,
    RenderedPrompt,
    SoundPieces,
    Tokenized,
    decode_detokenize_request,
    decode_features_request,
    decode_split_request,
    decode_tokenize_request,
)
from shared.protocol.requests import GenerateRequest, decode_request, tenant_of
from shared.stage.calls import reply_of
from shared.tenants.fair_turns import FairTurns
from workers.renderer.preview_path import PreviewPath
from workers.renderer.processing.processor import Processor
from workers.renderer.sound_splitter import SoundSplitter
from workers.renderer.threads import InThread

# Limit on calls in flight. At ten milliseconds each, the last call waits less than a second.
MAX_HELD = 64

Work = Callable[[bytes, str], Awaitable[bytes]]
"""Function from a request and its tenant to the answer."""


class RendererRpc:
    """Answers the calls of all models of a renderer."""

    def __init__(
        self,
        bus: Bus,
        path: PreviewPath,
        splitter: SoundSplitter,
        processors: Mapping[str, Processor],
        config: Config,
        in_thread: InThread,
    ) -> None:
        self._bus = bus
        self._path = path
        self._splitter = splitter
        self._processors = processors
        self._config = config
        self._in_thread = in_thread
        self._responders: list[GroupResponder] = []
        limits, complaint = config.renderer, "calls wait for this renderer"
        self._slots = FairTurns(max(1, limits.threads // 2), complaint)
        self._splitting = FairTurns(max(1, limits.decoders // 2), complaint)

    async def start(self) -> None:
        for model in self._processors:
            for call, work in (
                ("render", self._render),
                ("features", self._features),
                ("tokenize", self._tokenize),
                ("detokenize", self._detokenize),
                ("split", self._split),
                ("card", self._card),
            ):
                slots = self._splitting if call == "split" else self._slots
                answer = partial(self._reply, slots, partial(work, model))
                for of in (subjects.renderer, subjects.renderer_of_tenants):
                    responder = await self._bus.add_group_responder(
                        of(call, model), subjects.RENDERERS_GROUP, answer
                    )
                    self._responders.append(responder)

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Answer calls until `stop`, and finish those that have arrived by then."""
        await stop.wait()
        await asyncio.gather(*(responder.stop(drain_s) for responder in self._responders))

    async def _reply(
        self, slots: FairTurns, work: Work, data: bytes, named: str | None, _: str
    ) -> bytes:
        return await reply_of(self._answer(slots, work, data, named))

    async def _answer(self, slots: FairTurns, work: Work, data: bytes, named: str | None) -> bytes:
        tenant = tenant_of(named)
        async with slots.turn(tenant, MAX_HELD):
            answer = await work(data, tenant)
        self._bus.check_size(answer, "this answer")
        return answer

    async def _render(self, model: str, data: bytes, tenant: str) -> bytes:
        request = await asyncio.to_thread(decode_request.read, data)
        _check_model(request, model)
        rendered = await self._path.render(
            self._processors[model], prompt_of(request), self._bus.max_payload, tenant
        )
        head = RenderedPrompt(rendered.prompt_token_ids, rendered.items)
        return envelope.encode(head, rendered.tensors)

    async def _features(self, model: str, data: bytes, tenant: str) -> bytes:
        call = await asyncio.to_thread(decode_features_request.read, data)
        _check_model(call.request, model)
        rendered = await self._path.render_features(
            self._processors[model],
            prompt_of(call.request),
            self._config.models[model].hash_model_id or self._config.models[model].path,
            self._bus.max_payload,
            tenant,
            with_data=call.payload == "tensors",
        )
        return to_msgpack(rendered)

    async def _tokenize(self, model: str, data: bytes, tenant: str) -> bytes:
        prompt = prompt_to_tokenize(await asyncio.to_thread(decode_tokenize_request.read, data))
        processor = self._processors[model]
        token_ids = await self._path.tokenize(processor, prompt, tenant)
        spellings = await self._in_thread(processor.spellings, token_ids)
        return to_json(Tokenized(len(token_ids), processor.max_model_len, token_ids, spellings))

    async def _detokenize(self, model: str, data: bytes, tenant: str) -> bytes:
        request = await asyncio.to_thread(decode_detokenize_request.read, data)
        text, token_bytes = await self._in_thread(
            self._processors[model].detokenize, request.tokens, request.skip_special_tokens
        )
        return to_json(Detokenized(text, token_bytes))

    async def _split(self, model: str, data: bytes, tenant: str) -> bytes:
        request = await asyncio.to_thread(decode_split_request.read, data)
        urls = await self._splitter.split(self._processors[model], request.url, tenant)
        return to_json(SoundPieces(urls))

    async def _card(self, model: str, data: bytes, tenant: str) -> bytes:
        return to_json(self._processors[model].card(model))


def _check_model(request: GenerateRequest, model: str) -> None:
    if request.model != model:
        raise InvalidRequest(
            f"model is {request.model!r}, but the subject names {model!r}", field="model"
        )
