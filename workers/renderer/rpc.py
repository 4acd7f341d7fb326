"""Questions on the bus that are answered at once: what a prompt renders to, and how many tokens.

They share threads with engine-bound work, but may only ever have half of them, and what is asked
beyond a bound is refused at once: nobody's answer waits for somebody's counting. Tenants are
answered in turn, and when too much is asked it is the tenant with the most that is refused.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from shared.bus.bus import Bus
from shared.bus.subscriptions import GroupResponder
from shared.codec import envelope
from shared.config import Config
from shared.errors import InvalidRequest, Overloaded, PagemillError, WorkerFailure
from shared.protocol import subjects
from shared.protocol.messages import (
    GenerateRequest,
    decode_request,
    error_info,
    tenant_of,
    to_json,
    to_msgpack,
)
from shared.protocol.prompts import prompt_of, prompt_to_tokenize
from shared.protocol.renderer_rpc import (
    Detokenized,
    ErrorReply,
    RenderedPrompt,
    Tokenized,
    decode_detokenize_request,
    decode_features_request,
    decode_tokenize_request,
)
from shared.validation import split_validation_error
from workers.renderer.fair_queue import FairQueue
from workers.renderer.preview_path import PreviewPath
from workers.renderer.processing.processor import Processor
from workers.renderer.threads import InThread

# Asked and not answered; at ten milliseconds each, the last of them waits less than a second.
MAX_HELD = 64

Asked = TypeVar("Asked")

_log = structlog.get_logger()


class RendererRpc:
    def __init__(
        self,
        bus: Bus,
        path: PreviewPath,
        processors: Mapping[str, Processor],
        config: Config,
        in_thread: InThread,
    ) -> None:
        self._bus = bus
        self._path = path
        self._processors = processors
        self._config = config
        self._in_thread = in_thread
        self._turns: FairQueue[asyncio.Future[None]] = FairQueue()
        self._num_free = max(1, config.renderer.threads // 2)
        self._shares: list[GroupResponder] = []

    async def start(self) -> None:
        for model in self._processors:
            for subject, work in (
                (subjects.render(model), self._render),
                (subjects.features(model), self._features),
                (subjects.tokenize(model), self._tokenize),
                (subjects.detokenize(model), self._detokenize),
                (subjects.card(model), self._card),
            ):
                answer = partial(self._answer, partial(work, model))
                self._shares.append(
                    await self._bus.add_group_responder(subject, subjects.RENDERERS_GROUP, answer)
                )

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Answer until `stop`, and then what has been asked by then."""
        await stop.wait()
        await asyncio.gather(*(share.stop(drain_s) for share in self._shares))

    async def _answer(
        self, work: Callable[[bytes, str], Awaitable[bytes]], question: bytes, tenant: str | None
    ) -> bytes:
        try:
            asker = tenant_of(tenant)
            async with self._turn(asker):
                return await work(question, asker)
        except PagemillError as error:
            return _refusal(error)
        except Exception:
            _log.exception("not_answered")
            return _refusal(WorkerFailure("a worker failed on this request"))

    @contextlib.asynccontextmanager
    async def _turn(self, tenant: str) -> AsyncIterator[None]:
        """Raises Overloaded, at once or when somebody else is given the place."""
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        gone = self._turns.enter(tenant, mine, MAX_HELD)
        if gone is not None:
            gone.set_exception(Overloaded(f"{MAX_HELD} others wait for this renderer's answer"))
        self._go_on()
        try:
            await asyncio.shield(mine)
            yield
        finally:
            if not mine.done():
                self._turns.withdraw(tenant, mine)
            elif mine.exception() is None:
                self._num_free += 1
                self._turns.leave(tenant)
                self._go_on()

    def _go_on(self) -> None:
        while self._num_free and (waiter := self._turns.next()) is not None:
            self._num_free -= 1
            waiter.set_result(None)

    async def _render(self, model: str, question: bytes, tenant: str) -> bytes:
        request = await _decoded(decode_request, question)
        _check_model(request, model)
        rendered = await self._path.render(
            self._processors[model], prompt_of(request), self._bus.max_payload, tenant
        )
        head = RenderedPrompt(rendered.prompt_token_ids, rendered.items)
        return self._fitting(envelope.encode(head, rendered.tensors))

    async def _features(self, model: str, question: bytes, tenant: str) -> bytes:
        asked = await _decoded(decode_features_request, question)
        _check_model(asked.request, model)
        rendered = await self._path.render_features(
            self._processors[model],
            prompt_of(asked.request),
            self._config.models[model].hash_model_id or self._config.models[model].path,
            self._bus.max_payload,
            tenant,
            with_data=asked.payload == "tensors",
        )
        return self._fitting(to_msgpack(rendered))

    async def _tokenize(self, model: str, question: bytes, tenant: str) -> bytes:
        asked = prompt_to_tokenize(await _decoded(decode_tokenize_request, question))
        processor = self._processors[model]
        token_ids = await self._path.tokenize(processor, asked, tenant)
        spellings = await self._in_thread(processor.spellings, token_ids)
        counted = Tokenized(len(token_ids), processor.max_model_len, token_ids, spellings)
        return self._fitting(to_json(counted))

    async def _detokenize(self, model: str, question: bytes, tenant: str) -> bytes:
        request = await _decoded(decode_detokenize_request, question)
        told = await self._in_thread(
            self._processors[model].detokenize, request.tokens, request.skip_special_tokens
        )
        return self._fitting(to_json(Detokenized(*told)))

    async def _card(self, model: str, question: bytes, tenant: str) -> bytes:
        return to_json(self._processors[model].card(model))

    def _fitting(self, answer: bytes) -> bytes:
        self._bus.check_size(answer, "this answer")
        return answer


def _check_model(request: GenerateRequest, model: str) -> None:
    if request.model != model:
        raise InvalidRequest(
            f"model is {request.model!r}, but the subject names {model!r}", field="model"
        )


async def _decoded(decode: Callable[[bytes], Asked], question: bytes) -> Asked:
    try:
        return await asyncio.to_thread(decode, question)
    except msgspec.ValidationError as error:
        what, field = split_validation_error(error)
        raise InvalidRequest(f"{field or 'request'}: {what}", field=field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request is neither JSON nor msgpack: {error}") from error


def _refusal(error: PagemillError) -> bytes:
    return to_json(ErrorReply(error_info(error)))
