"""Client of the bus: publish requests, follow their token logs, cancel them, store media, and query
renderers.
"""

import asyncio
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from shared.bus.bus import Bus
from shared.codec import envelope
from shared.codec.envelope import TensorData
from shared.errors import InvalidRequest, Unavailable, UnsupportedVersion
from shared.helpers.task_set import run_for_each
from shared.protocol import names, subjects
from shared.protocol import renderer_rpc as rpc
from shared.protocol.encoding import to_json
from shared.protocol.pipeline import TEXT
from shared.protocol.records import LogRecord, OutputRecord, named_error
from shared.protocol.requests import GenerateRequest, encode_request, version_of_request
from shared.protocol.versions import OLDEST_VERSION, needed_version, version_header
from shared.state import media_store
from shared.state.log_reader import LogReader

# A renderer may have to fetch and process all images of a request before it replies.
ANSWER_TIMEOUT_S = 30.0
# Pause before a call is repeated because it reached an older renderer, which cannot read it.
NEWER_PAUSE_S = 0.1
MAX_MEDIA_BYTES = 256 * 2**20
"""Limit on the size of a file that is read into memory."""
MAX_CANCELS_AT_ONCE = 64

Reply = TypeVar("Reply")


def new_request_id() -> str:
    return f"req-{secrets.token_hex(8)}"


async def ask(
    bus: Bus,
    request: GenerateRequest,
    request_id: str,
    sampling: Mapping[str, Any] | None = None,
    *,
    trace: Mapping[str, str] | None = None,
    is_repeated: bool = False,
) -> AsyncGenerator[LogRecord, None]:
    """Publish `request` and yield the records of its log in order, up to the final one.

    The id contains the tenant of the request, see `shared.protocol.names.scoped_id`. `sampling` has
    sampling parameters that replace the request's. They take precedence over the model's configured
    defaults, even where they are equal to the defaults of SamplingParams. `trace` has the headers
    `traceparent` and `tracestate`, if the request is part of a trace.

    A request id that was used before yields the log of the earlier request. With `is_repeated`,
    that log is read at once. Raises Overloaded when the queue is full. Raises Unavailable when the
    broker does not store the request, or when a request with a `timeout_s` has no final record well
    after that time.
    """
    async with LogReader(bus, request_id, 0) as reader:
        await publish_request(bus, request, request_id, sampling, trace)
        async for record in reader.records(at_once=is_repeated, timeout_s=request.timeout_s):
            if isinstance(record, LogRecord):
                yield record


async def publish_request(
    bus: Bus,
    request: GenerateRequest,
    request_id: str,
    sampling: Mapping[str, Any] | None = None,
    trace: Mapping[str, str] | None = None,
) -> None:
    """Publish `request`, unless a request with this id is in flight. Raises as `ask` does."""
    _check_request_id(request_id)
    _check_model(request.model)
    subject, data = subjects.request(request.model, request_id), encode_request(request, sampling)
    headers = version_header(version_of_request(request, sampling)) | dict(trace or {})
    await bus.publish_without_id(subject, data, headers)


async def follow(
    bus: Bus,
    request_id: str,
    start: int = 0,
    timeout_s: float | None = None,
    is_void: Callable[[], Awaitable[bool]] | None = None,
) -> AsyncGenerator[LogRecord, None]:
    """Yield the log of a request from record `start` on: the stored records, then new ones.

    `timeout_s` is the time that the request has left. If the log has no final record well after it,
    this raises Unavailable, or LogTruncated for a log without any record. `is_void` is called when
    the log is still empty after a pause, and returns whether it will stay empty. Raises
    LogTruncated when the next record has been removed.
    """
    async with _reader_of(bus, request_id, start) as reader:
        async for record in reader.records(at_once=True, timeout_s=timeout_s, is_void=is_void):
            if isinstance(record, LogRecord):
                yield record


async def follow_output(
    bus: Bus,
    request_id: str,
    output: str,
    start: int = 0,
    timeout_s: float | None = None,
    is_void: Callable[[], Awaitable[bool]] | None = None,
) -> AsyncGenerator[OutputRecord, None]:
    """Yield the records of an output other than the text, from record `start` to its OutputEnd.

    `is_void` is as in `follow`. Raises what `follow` raises.
    """
    _check_name(output, "output")
    async with _reader_of(bus, request_id, start, output) as reader:
        async for record in reader.records(at_once=True, timeout_s=timeout_s, is_void=is_void):
            if isinstance(record, OutputRecord):
                yield record


def _reader_of(bus: Bus, request_id: str, start: int, output: str = TEXT) -> LogReader:
    if not names.is_task_id(request_id):
        raise InvalidRequest(f"request_id {names.NAME_RULE}", field="request_id")
    return LogReader(bus, request_id, start, output)


async def cancel(bus: Bus, request_id: str, trace: Mapping[str, str] | None = None) -> None:
    """Cancel a request in any stage. Returns when the broker has stored the cancellation.

    The log then ends with the error `cancelled`, unless it has ended already. `trace` is as in
    `ask`.
    """
    _check_request_id(request_id)
    # The stream stores one cancellation per request, so duplicates need no message id.
    await bus.publish_without_id(subjects.cancel(request_id), b"", dict(trace or {}))


async def cancel_all(
    bus: Bus, request_ids: Iterable[str], trace: Mapping[str, str] | None = None
) -> None:
    """Cancel several requests, like `cancel`. A failure of one leaves the others."""
    await run_for_each(lambda each: cancel(bus, each, trace), request_ids, MAX_CANCELS_AT_ONCE)


async def pin_media(bus: Bus, data: bytes, tenant: str = "") -> str:
    """Store a media file, and return its URL for use in any number of requests.

    The file is kept at least for the longest time that a request may take, counted again from each
    request that names it. Requests of other tenants do not find it. Raises Unavailable.
    """
    name = await media_store.hash_media(data)
    await media_store.store(bus, name, data, tenant)
    return media_store.media_url(name)


async def find_media(bus: Bus, url: str, tenant: str = "") -> bytes | None:
    """Return the file that a `media:` URL names; None if it is not stored for this tenant.

    Raises Unavailable, and MediaTooLarge for a file over MAX_MEDIA_BYTES.
    """
    name = media_store.parse_media_url(url)
    return None if name is None else await media_store.find(bus, name, MAX_MEDIA_BYTES, tenant)


async def read_media(bus: Bus, url: str, tenant: str = "") -> bytes:
    """Return the file that a `media:` URL names. Raises Unavailable if it is not stored."""
    data = await find_media(bus, url, tenant)
    if data is None:
        raise Unavailable("the media file is not stored any more")
    return data


async def render(
    bus: Bus, request: GenerateRequest, tenant: str = ""
) -> tuple[rpc.RenderedPrompt, list[TensorData]]:
    """Return the prompt that an engine would get for `request`, and the tensors of its items.

    Raises the error in the renderer's reply, with `reported` set. Raises PayloadTooLarge for a
    request that does not fit into a message, and Unavailable when no renderer of the model replies.
    """
    reply = await _ask_newer(bus, request.model, "render", request, tenant)
    return _unwrap(rpc.decode_error_reply(reply) or envelope.decode(reply, rpc.RenderedPrompt))


async def render_features(
    bus: Bus, request: rpc.FeaturesRequest, tenant: str = ""
) -> rpc.RenderedFeatures:
    """Return the features that another server would get for `request`. Raises as `render` does."""
    reply = await _ask_newer(bus, request.request.model, "features", request, tenant)
    return _unwrap(rpc.decode_error_reply(reply) or rpc.decode_rendered_features(reply))


async def tokenize(
    bus: Bus, model: str, request: rpc.TokenizeRequest, tenant: str = ""
) -> rpc.Tokenized:
    """Return the tokens of a prompt. Raises as `render` does."""
    return _unwrap(rpc.decode_tokenized(await _ask_newer(bus, model, "tokenize", request, tenant)))


async def detokenize(
    bus: Bus, model: str, request: rpc.DetokenizeRequest, tenant: str = ""
) -> rpc.Detokenized:
    """Return the text of tokens. Raises as `render` does."""
    reply = await _request(bus, model, "detokenize", to_json(request), tenant)
    return _unwrap(rpc.decode_detokenized(reply))


async def split_sound(bus: Bus, model: str, url: str, tenant: str = "") -> rpc.SoundPieces:
    """Return the pieces of a stored recording, each short enough for the model.

    Raises as `render` does.
    """
    reply = await _request(bus, model, "split", to_json(rpc.SplitRequest(url)), tenant)
    return _unwrap(rpc.decode_sound_pieces(reply))


async def model_card(bus: Bus, model: str, timeout_s: float = ANSWER_TIMEOUT_S) -> rpc.ModelCard:
    """Return the card of a model. Raises as `render` does."""
    return _unwrap(
        rpc.decode_model_card(await _request(bus, model, "card", b"", timeout_s=timeout_s))
    )


def _unwrap(reply: Reply | rpc.ErrorReply) -> Reply:
    if isinstance(reply, rpc.ErrorReply):
        raise named_error(reply.error)
    return reply


async def _ask_newer(bus: Bus, model: str, call: str, question: Struct, tenant: str) -> bytes:
    """Return the reply of a renderer that can read the question; older ones may get it first.

    Raises UnsupportedVersion if only older renderers have replied in time.
    """
    data, version = to_json(question), needed_version(question)
    deadline_s = asyncio.get_running_loop().time() + ANSWER_TIMEOUT_S
    while True:
        left_s = max(0.001, deadline_s - asyncio.get_running_loop().time())
        try:
            return await _request(bus, model, call, data, tenant, left_s, version)
        except UnsupportedVersion:
            if left_s <= NEWER_PAUSE_S:
                raise
        await asyncio.sleep(NEWER_PAUSE_S)


async def _request(
    bus: Bus,
    model: str,
    call: str,
    data: bytes,
    tenant: str = "",
    timeout_s: float = ANSWER_TIMEOUT_S,
    version: int = OLDEST_VERSION,
) -> bytes:
    _check_model(model)
    subject = subjects.renderer(call, model)
    bus.check_size(data, subject)
    try:
        return await bus.request(subject, data, timeout_s, tenant, version)
    except TimeoutError:
        raise Unavailable(f"no renderer of {model} has replied within {timeout_s:g} s") from None
    except Unavailable:
        raise Unavailable(f"no renderer of {model} is running") from None


def _check_request_id(value: str) -> None:
    if not names.is_scoped_id(value):
        raise InvalidRequest(f"request_id {names.REQUEST_ID_RULE}", field="request_id")


def _check_model(name: str) -> None:
    if not names.is_model_name(name):
        raise InvalidRequest(f"model {names.MODEL_NAME_RULE}", field="model")


def _check_name(value: str, field: str) -> None:
    if not names.is_name(value):
        raise InvalidRequest(f"{field} {names.NAME_RULE}", field=field)
