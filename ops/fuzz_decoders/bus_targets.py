"""Targets on the bus: requests, tasks, records, and messages between workers."""

import asyncio
import socket
from collections.abc import Callable
from typing import Any

import msgspec

from ops.fuzz_decoders.seeds import json_messages, msgpack_messages, structs_of
from ops.fuzz_decoders.target import Form, FuzzTarget
from shared.blobs import mm_items, protocol
from shared.blobs.mm_items import ItemContents
from shared.codec import envelope, vllm_kwargs
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, FlatField, SharedField, WireField
from shared.errors import DecodeError, InvalidRequest, UnsupportedVersion
from shared.protocol import messages, names, renderer_rpc, requests, steps, subjects, task_messages
from shared.protocol.encoding import UNDECODABLE, ClientDecoder
from shared.protocol.records import AnyRecord
from shared.protocol.task_messages import Task
from shared.protocol.worker_status import WorkerStatus, decode_status
from shared.stage import tasks
from shared.state import item_results, log_records
from workers.engine.core.kv_events import EventBatch
from workers.renderer.decoding import messages as decoder_messages

_TENSORS = (
    TensorData("uint8", (2, 3), memoryview(b"abcdef")),
    TensorData("bool", (2,), memoryview(b"\1\0")),
    TensorData("float32", (0, 4), memoryview(b"")),
)
_BODIES = (
    task_messages.RenderBody,
    task_messages.EngineBody,
    task_messages.EncodeBody,
    task_messages.FollowBody,
    task_messages.SpeechBody,
    task_messages.PaintBody,
)


def _message(
    name: str,
    decode: Callable[[bytes], Any],
    kind: Any,
    form: Form = "json",
    answers: tuple[type[Exception], ...] = (),
) -> FuzzTarget:
    make = json_messages if form == "json" else msgpack_messages
    return FuzzTarget(name, decode, lambda: make(kind), answers, form)


def _envelope(data: bytes) -> None:
    head, tensors = envelope.decode(data, ItemContents)
    mm_items.select_tensors(head.fields, tensors)
    again, copies = envelope.decode(envelope.encode(head, tensors), ItemContents)
    assert again == head
    assert [copy.data for copy in copies] == [tensor.data for tensor in tensors]


def _envelopes() -> list[bytes]:
    return [
        envelope.encode(ItemContents({}, 1), ()),
        envelope.encode(ItemContents({"pixels": 0, "mask": 1, "none": 2}, 4), _TENSORS),
    ]


def _task(body: type[Any]) -> FuzzTarget:
    def make() -> list[bytes]:
        kind = Task[body]  # type: ignore[valid-type]
        return [
            envelope.encode(task, tensors)
            for task, tensors in zip(structs_of(kind), ((), _TENSORS), strict=False)
        ]

    name = f"task_{body.__name__.removesuffix('Body').lower()}"
    answers = (DecodeError, UnsupportedVersion)
    return FuzzTarget(name, lambda data: tasks.decode(data, body), make, answers, "envelope")


def _vllm_items() -> list[bytes]:
    fields = {
        "pixels": WireField(_TENSORS[0], BatchedField()),
        "grid": WireField(_TENSORS[1], FlatField([[[0, 2, None]], [[None, None, 1], 3]], 1)),
        "shared": WireField(_TENSORS[2], SharedField(2, keep_on_cpu=True)),
    }
    numbers = TensorData("float64", (1,), memoryview(bytes(8)))
    listed = {"seconds": WireField(numbers, BatchedField(keep_on_cpu=True), is_list=True)}
    return [vllm_kwargs.encode_item(fields), vllm_kwargs.encode_item(listed)]


def _decode_vllm_item(data: bytes) -> None:
    fields = vllm_kwargs.decode_item(data, "item")
    assert vllm_kwargs.decode_item(vllm_kwargs.encode_item(fields), "item").keys() == fields.keys()


def _client(name: str, decoder: ClientDecoder[Any], kind: Any) -> list[FuzzTarget]:
    """Return the targets of a message that is JSON or msgpack."""
    run = decoder.read
    return [
        _message(name, run, kind, "json", (InvalidRequest,)),
        _message(f"{name}_msgpack", run, kind, "msgpack", (InvalidRequest,)),
    ]


def _kv_batch(data: bytes) -> None:
    batch = msgspec.msgpack.decode(data, type=EventBatch)
    for event in batch.events:
        msgspec.msgpack.decode(event)


_LOOP = asyncio.new_event_loop()


def _blob_transport(data: bytes) -> None:
    """Read the bytes as a blob's owner does over a socket, as its reader, and over the broker."""
    chunk = protocol.unpack_chunk(data)
    # NaN is not equal to itself, so bytes are compared.
    assert chunk is None or protocol.pack_chunk(chunk) == data
    for read in (protocol.read_request, protocol.read_reply):
        near, far = socket.socketpair()
        with near, far:
            near.setblocking(False)
            far.sendall(data[:4096])
            far.shutdown(socket.SHUT_WR)
            _LOOP.run_until_complete(read(near))


def _blob_messages() -> list[bytes]:
    key = bytes(range(protocol.KEY_BYTES))
    request = protocol._request.pack(protocol.FIND, key, 1.5)
    reply = protocol._reply.pack(1, 64, 128, key)
    return [request + reply, reply, protocol.pack_chunk(protocol.BlobChunk(b"G", key, 64, 128))]


def _subject(data: bytes) -> None:
    """Read the parts of subjects, which have the tokens that the broker's filter asks for."""
    tokens = [token for token in data.decode(errors="replace").split(".") if token] or ["a"]
    subject = ".".join(tokens)
    tenant = subjects.tenant_of(f"pm.request.{subject}")
    subjects.model_of_request(f"pm.request.{subject}")
    subjects.id_in(f"pm.cancel.{subject}")
    subjects.place_of(subject, tenant)
    subjects.model_of_stage(f"pm.request.{subject}")
    if len(tokens) == 4:
        subjects.parts_of_stage(f"pm.stage.{subject}")
        subjects.slot_of_stage(f"pm.stage.{subject}")
    request_id = subjects.id_in(f"pm.cancel.{subject}")
    if names.is_scoped_id(request_id):
        for output in ("text", "audio"):
            assert subjects.id_of_log(subjects.tokens(request_id, output)) == request_id


def _name(data: bytes) -> None:
    text = data.decode(errors="replace")
    token = names.encode_model(text)
    assert names.decode_model(token) == text
    decoded = names.decode_model(text)
    assert decoded == text or names.encode_model(decoded) == text
    for is_valid in (names.is_name, names.is_model_name, names.is_task_id):
        is_valid(text)
    assert not names.is_scoped_id(text) or names.scoped_id(*names.split_id(text)) == text


BUS_TARGETS = [
    FuzzTarget("envelope", _envelope, _envelopes, (DecodeError, UnsupportedVersion), "envelope"),
    *map(_task, _BODIES),
    FuzzTarget("vllm_kwargs", _decode_vllm_item, _vllm_items, (InvalidRequest,), "msgpack"),
    _message("kv_batch", _kv_batch, EventBatch, "msgpack", UNDECODABLE),
    *_client("request", requests.decode_request, requests.GenerateRequest),
    *_client("tokenize", renderer_rpc.decode_tokenize_request, renderer_rpc.TokenizeRequest),
    *_client("features", renderer_rpc.decode_features_request, renderer_rpc.FeaturesRequest),
    *_client("split", renderer_rpc.decode_split_request, renderer_rpc.SplitRequest),
    *_client("detokenize", renderer_rpc.decode_detokenize_request, renderer_rpc.DetokenizeRequest),
    _message("record", log_records.decode_record, AnyRecord),
    _message("heartbeat", messages.decode_heartbeat, messages.Heartbeat),
    _message("start_report", messages.decode_start_report, messages.StartReport),
    _message("attempt", messages.decode_attempt, messages.AttemptRecord),
    _message("media_head", messages.decode_media_head, messages.MediaHead),
    _message("scale_plan", messages.decode_scale_plan, messages.ScalePlan),
    _message("pool_report", messages.decode_pool_report, messages.PoolReport),
    _message("scale_orders", messages.decode_scale_orders, messages.ScaleOrders),
    _message("metrics", messages.decode_metrics, messages.WorkerMetrics),
    _message("common_settings", messages.decode_common_settings, messages.CommonSettings),
    _message("job_record", messages.decode_job_record, messages.RequestRecord, "json", UNDECODABLE),
    _message("video_job", messages.decode_video_job, messages.VideoJob),
    _message("cached_images", messages.decode_cached_images, messages.CachedImages, "msgpack"),
    _message(
        "dead_letter", messages.decode_dead_letter, messages.DeadLetter, "msgpack", UNDECODABLE
    ),
    _message("worker_status", decode_status, WorkerStatus),
    _message("step", steps.decode_step, steps.Step),
    _message("response_task", steps.decode_response_task, steps.ResponseTask, "json", UNDECODABLE),
    _message(
        "item_result",
        item_results.decode,
        task_messages.ItemResult,
        "msgpack",
        (DecodeError, UnsupportedVersion),
    ),
    _message(
        "decoder_reply",
        decoder_messages.decode_reply,
        decoder_messages.Reply,
        "msgpack",
        UNDECODABLE,
    ),
    FuzzTarget("blob_transport", _blob_transport, _blob_messages, (ConnectionError,)),
    FuzzTarget("subject", _subject, lambda: [b"@t.m", b"engine.a=2Fb.batch-3.id", b"a:1:b:0"]),
    FuzzTarget("name", _name, lambda: [b"org/a.5", b"org=2Fa=2E5", b"id@tenant", b"item_a"]),
]
