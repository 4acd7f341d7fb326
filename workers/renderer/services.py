"""Questions on the bus that are answered at once: what a prompt renders to, and how many tokens.

They share threads with engine-bound work, but may only ever have half of them, and what is asked
beyond a bound is refused at once: nobody's answer waits for somebody's counting.
"""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import TypeVar

import msgspec
import structlog

from shared import codec, subjects
from shared.bus import Bus, Share
from shared.config import RendererConfig, split_path
from shared.errors import InvalidRequest, Overloaded, PagemillError, WorkerFailure
from shared.messages import (
    Refusal,
    RenderedPrompt,
    Tokenized,
    decode_request,
    decode_tokenize_request,
    error_info,
    tenant_of,
    to_json,
)
from workers.renderer.processor import Processor
from workers.renderer.readonly_path import ReadOnlyPath

# Asked and not answered; at ten milliseconds each, the last of them waits less than a second.
MAX_HELD = 64

Asked = TypeVar("Asked")

_log = structlog.get_logger()


class Services:
    def __init__(
        self,
        bus: Bus,
        path: ReadOnlyPath,
        processors: Mapping[str, Processor],
        limits: RendererConfig,
    ) -> None:
        self._bus = bus
        self._path = path
        self._processors = processors
        self._credit = asyncio.Semaphore(max(1, limits.threads // 2))
        self._num_held = 0
        self._shares: list[Share] = []

    async def start(self) -> None:
        for model in self._processors:
            for subject, work in (
                (subjects.render(model), self._render),
                (subjects.tokenize(model), self._tokenize),
            ):
                answer = partial(self._answer, partial(work, model))
                self._shares.append(
                    await self._bus.share(subject, subjects.RENDERERS_GROUP, answer)
                )

    async def run(self, stop: asyncio.Event, drain_s: float) -> None:
        """Answer until `stop`, and then what has been asked by then."""
        await stop.wait()
        await asyncio.gather(*(share.stop(drain_s) for share in self._shares))

    async def _answer(
        self, work: Callable[[bytes, str], Awaitable[bytes]], question: bytes, tenant: str | None
    ) -> bytes:
        if self._num_held >= MAX_HELD:
            return _refusal(Overloaded(f"{MAX_HELD} others wait for this renderer's answer"))
        self._num_held += 1
        try:
            async with self._credit:
                return await work(question, tenant_of(tenant))
        except PagemillError as error:
            return _refusal(error)
        except Exception:
            _log.exception("not_answered")
            return _refusal(WorkerFailure("a worker failed on this request"))
        finally:
            self._num_held -= 1

    async def _render(self, model: str, question: bytes, tenant: str) -> bytes:
        request = await _decoded(decode_request, question)
        if request.model != model:
            raise InvalidRequest(
                f"model is {request.model!r}, but the subject names {model!r}", field="model"
            )
        processor = self._processors[model]
        rendered = await self._path.render(processor, request.messages or [], self._bus.max_payload)
        head = RenderedPrompt(rendered.prompt_token_ids, rendered.items)
        answer = codec.encode(head, rendered.tensors)
        self._bus.check_size(answer, "this answer")
        return answer

    async def _tokenize(self, model: str, question: bytes, tenant: str) -> bytes:
        request = await _decoded(decode_tokenize_request, question)
        processor = self._processors[model]
        if request.messages is not None and request.prompt is None:
            token_ids = await self._path.tokenize(processor, request.messages)
        elif request.prompt is not None and request.messages is None:
            token_ids = await self._path.tokenize_text(processor, request.prompt, "prompt")
        else:
            raise InvalidRequest("give either messages or a prompt", field="messages")
        answer = to_json(Tokenized(len(token_ids), processor.max_model_len, token_ids))
        self._bus.check_size(answer, "this answer")
        return answer


async def _decoded(decode: Callable[[bytes], Asked], question: bytes) -> Asked:
    try:
        return await asyncio.to_thread(decode, question)
    except msgspec.ValidationError as error:
        what, field = split_path(str(error))
        raise InvalidRequest(f"{field or 'request'}: {what}", field=field or None) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequest(f"the request is neither JSON nor msgpack: {error}") from error


def _refusal(error: PagemillError) -> bytes:
    return to_json(Refusal(error_info(error)))
