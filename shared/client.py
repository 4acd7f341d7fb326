"""What a client does: publish a request, follow its token log, cancel it; store a picture; ask a
renderer what it would make of a request."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.errors import InvalidRequest, LogTruncated, Unavailable
from shared.protocol import subjects
from shared.protocol.messages import (
    GenerateRequest,
    LogRecord,
    decode_log_record,
    encode_request,
    to_json,
)
from shared.protocol.renderer_rpc import (
    Detokenized,
    DetokenizeRequest,
    ErrorReply,
    FeaturesRequest,
    ModelCard,
    RenderedFeatures,
    RenderedPrompt,
    Tokenized,
    TokenizeRequest,
    decode_detokenized,
    decode_error_reply,
    decode_model_card,
    decode_rendered_features,
    decode_tokenized,
)
from shared.state import media_store
from shared.state.token_log import is_final

# Live records may be lost on the way; after this silence the log itself is asked, and less and less
# often while it has nothing new.
SILENCE_S = 2.0
MAX_SILENCE_S = 15.0
# By then the coordinator has ended what nobody else has.
GRACE_S = 15.0
# Of a renderer: as long as it takes to fetch and process the pictures of one request.
ANSWER_TIMEOUT_S = 30.0


def new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


async def ask(
    bus: Bus,
    request: GenerateRequest,
    request_id: str,
    tenant: str = "",
    sampling: Mapping[str, Any] | None = None,
) -> AsyncIterator[LogRecord]:
    """Publish `request` and yield its log, each record once and in order, to the final one.

    `sampling` are the sampling parameters that were given, in place of the request's: they win over
    the model's configured defaults even where they are equal to the defaults of SamplingParams.

    A request id that was used before yields the log of the request that used it. Raises Overloaded
    when the queue is full, Unavailable when the broker does not take the request, or when a request
    with a `timeout_s` has no final record well after it.
    """
    _check_request_id(request_id)
    _check_name(request.model, "model")
    reader = _Reader(bus, request_id, 0)
    await reader.open()
    try:
        data = encode_request(request, sampling)
        subject = subjects.request(request.model)
        known = await bus.publish(subject, data, request_id, tenant=tenant)
        async for record in reader.records(at_once=known, timeout_s=request.timeout_s):
            yield record
    finally:
        await reader.close()


async def follow(
    bus: Bus, request_id: str, start: int = 0, timeout_s: float | None = None
) -> AsyncIterator[LogRecord]:
    """Yield the log of a request from record `start` on, as far as it is and as it grows.

    Raises LogTruncated when the record that comes next is not there any more; with `timeout_s`,
    by which the request must have ended, also when well after it there is none at all, and
    Unavailable when there is no final one.
    """
    _check_name(request_id, "request_id")
    reader = _Reader(bus, request_id, start)
    await reader.open()
    try:
        async for record in reader.records(at_once=True, timeout_s=timeout_s):
            yield record
    except _Unended:
        if reader.is_empty:
            raise LogTruncated("this log has been removed to make room") from None
        raise
    finally:
        await reader.close()


async def cancel(bus: Bus, request_id: str) -> None:
    """Have a request ended, wherever it is; returns when that cannot be lost any more.

    Its log then ends with the error `cancelled`, unless it has ended before.
    """
    _check_request_id(request_id)
    # The stream keeps one of them at a time, and needs no id to tell.
    await bus.publish_without_id(subjects.cancel(request_id), b"")


async def pin_media(bus: Bus, data: bytes, tenant: str = "") -> str:
    """Store a picture's file once, and return the URL by which any number of requests may name it.

    It is there for at least as long as the longest request may take, and anew from each request
    that names it. Requests of other tenants do not find it. Raises Unavailable.
    """
    name = await media_store.hash_media(data)
    await media_store.store(bus, name, data, tenant)
    return media_store.media_url(name)


async def render(
    bus: Bus, request: GenerateRequest, timeout_s: float = ANSWER_TIMEOUT_S, tenant: str = ""
) -> tuple[RenderedPrompt, list[TensorData]] | ErrorReply:
    """What an engine would be given for `request`, and the tensors that its items name.

    Raises PayloadTooLarge for a request that does not fit into a message, and Unavailable when no
    renderer of the model answers.
    """
    question = to_json(request)
    answer = await _question(bus, request.model, subjects.render, question, timeout_s, tenant)
    refusal = decode_error_reply(answer)
    return envelope.decode(answer, RenderedPrompt) if refusal is None else refusal


async def render_features(
    bus: Bus, request: FeaturesRequest, timeout_s: float = ANSWER_TIMEOUT_S, tenant: str = ""
) -> RenderedFeatures | ErrorReply:
    """What another server would be given for a request. Raises what `render` raises."""
    question, model = to_json(request), request.request.model
    answer = await _question(bus, model, subjects.features, question, timeout_s, tenant)
    refusal = decode_error_reply(answer)
    return decode_rendered_features(answer) if refusal is None else refusal


async def tokenize(
    bus: Bus,
    model: str,
    request: TokenizeRequest,
    timeout_s: float = ANSWER_TIMEOUT_S,
    tenant: str = "",
) -> Tokenized | ErrorReply:
    """The tokens of a prompt. Raises what `render` raises."""
    question = to_json(request)
    answer = await _question(bus, model, subjects.tokenize, question, timeout_s, tenant)
    return decode_tokenized(answer)


async def detokenize(
    bus: Bus,
    model: str,
    request: DetokenizeRequest,
    timeout_s: float = ANSWER_TIMEOUT_S,
    tenant: str = "",
) -> Detokenized | ErrorReply:
    """The text of tokens. Raises what `render` raises."""
    question = to_json(request)
    answer = await _question(bus, model, subjects.detokenize, question, timeout_s, tenant)
    return decode_detokenized(answer)


async def model_card(
    bus: Bus, model: str, timeout_s: float = ANSWER_TIMEOUT_S
) -> ModelCard | ErrorReply:
    """What can be asked of a model. Raises Unavailable when no renderer of it answers."""
    return decode_model_card(await _question(bus, model, subjects.card, b"", timeout_s))


async def _question(
    bus: Bus,
    model: str,
    subject_of: Callable[[str], str],
    question: bytes,
    timeout_s: float,
    tenant: str = "",
) -> bytes:
    _check_name(model, "model")
    bus.check_size(question, subject_of(model))
    try:
        return await bus.request(subject_of(model), question, timeout_s, tenant)
    except TimeoutError:
        raise Unavailable(f"no renderer of {model} has answered in {timeout_s:g} s") from None


class _Unended(Unavailable):
    """A request whose time is over."""


class _Reader:
    """Live records as long as they come in order, the log itself where they do not."""

    def __init__(self, bus: Bus, request_id: str, start: int) -> None:
        self._bus = bus
        self._subject = subjects.tokens(request_id)
        self._expected = start
        self._first = 1
        """The sequence from which on the log has not been read yet."""

    @property
    def is_empty(self) -> bool:
        """Whether no record of the log has been seen."""
        return self._expected == 0

    async def open(self) -> None:
        self._listener = await self._bus.subscribe(self._subject)

    async def close(self) -> None:
        """Does nothing the second time."""
        await self._bus.unsubscribe(self._listener)

    async def records(self, *, at_once: bool, timeout_s: float | None) -> AsyncIterator[LogRecord]:
        """`at_once`: there may be a log already."""
        loop = asyncio.get_running_loop()
        give_up = None if timeout_s is None else loop.time() + timeout_s + GRACE_S
        silence_s = 0.0 if at_once else SILENCE_S
        while True:
            began = loop.time()
            fresh = await self._next(silence_s)
            silent = not fresh and loop.time() - began >= silence_s
            silence_s = min(max(2 * silence_s, SILENCE_S), MAX_SILENCE_S) if silent else SILENCE_S
            for record in fresh:
                if not is_final(record):
                    yield record
                    continue
                # Who has the last one may not come back, and then nobody knows when we are closed.
                await self.close()
                yield record
                return
            if give_up is not None and not fresh and loop.time() > give_up:
                raise _Unended("no worker has ended the request by its deadline")

    async def _next(self, silence_s: float) -> list[LogRecord]:
        """New records in order, live or from the log; none after `silence_s` without any."""
        live = await self._listener.next(silence_s) if silence_s else None
        if live is not None:
            record = decode_log_record(live.data)
            if record.index < self._expected:
                return []
            if record.index == self._expected:
                self._expected += 1
                self._first = live.sequence + 1
                return [record]
        stored = await self._bus.read(subjects.TOKENS_STREAM, self._subject, self._first)
        fresh = []
        for message in stored:
            self._first = message.sequence + 1
            record = decode_log_record(message.data)
            if record.index > self._expected:
                raise LogTruncated("the beginning of this log has been removed to make room")
            if record.index == self._expected:
                fresh.append(record)
                self._expected = record.index + 1
        return fresh


def _check_request_id(value: str) -> None:
    _check_name(value, "request_id")
    if not subjects.is_request_id(value):
        raise InvalidRequest("names that begin so are those of encoders' tasks", field="request_id")


def _check_name(value: str, field: str) -> None:
    if not subjects.is_name(value):
        raise InvalidRequest(
            f"{field} must be 1 to {subjects.MAX_NAME_LEN} letters, digits, '-' or '_'",
            field=field,
        )
