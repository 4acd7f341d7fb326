"""Versions of messages between workers: a newer message that an older reader can ignore is read."""

import msgspec
import pytest
from msgspec import Struct

from shared.protocol import messages, records, renderer_rpc, task_messages
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import BlobRef
from shared.protocol.records import ErrorInfo
from shared.protocol.requests import GenerateRequest
from shared.state.token_log import decode_record

ERROR = ErrorInfo("unavailable", "later", None, "server", True)
REPLIES: list[Struct] = [
    messages.RequestRecord("chat", "m", "t", 1, True),
    messages.AttemptRecord("engine", "engine-1", 1, 0.0, 0),
    messages.MediaHead(1, 1),
    messages.MediaPin([messages.PinnedPart("a", "b")]),
    messages.WorkerMetrics("engine", "engine-1", []),
    messages.CommonSettings("engine-1", {"delivery.ack_wait_s": 10.0}),
    task_messages.ItemResult(BlobRef("engine-1", bytes(32), 1)),
    renderer_rpc.Tokenized(1, 2, [3]),
    renderer_rpc.Detokenized("a", [b"a"]),
    renderer_rpc.ModelCard("m", 1, 2, True, False),
    renderer_rpc.RenderedFeatures([1], []),
    renderer_rpc.RenderedPrompt([1], []),
    renderer_rpc.ErrorReply(ERROR),
]
REQUESTS: list[Struct] = [
    renderer_rpc.TokenizeRequest(prompt="a"),
    renderer_rpc.DetokenizeRequest([1]),
    renderer_rpc.FeaturesRequest(GenerateRequest("m", prompt="a")),
]


def newer(message: Struct, **more: object) -> bytes:
    fields = msgspec.json.decode(to_json(message))
    assert fields["version"] == 1
    return msgspec.json.encode(fields | {"version": 2} | more)


@pytest.mark.parametrize("message", REPLIES, ids=lambda message: type(message).__name__)
def test_a_newer_message_with_another_field_is_read(message: Struct) -> None:
    read = msgspec.json.decode(newer(message, later=[1]), type=type(message))
    assert msgspec.structs.replace(read, version=1) == message


RECORDS: list[Struct] = [
    records.CodeChunk(3, 1, 8, [[1, 2], [3, 4]]),
    records.AudioChunk(4, 1, 960, 2, 24_000, "AAD9/w==", end_token=7),
]


@pytest.mark.parametrize("record", RECORDS, ids=lambda record: type(record).__name__)
def test_a_record_of_a_newer_version_with_another_field_is_read(record: Struct) -> None:
    fields = msgspec.json.decode(to_json(record))
    assert decode_record(msgspec.json.encode(fields | {"later": [1]})) == record


@pytest.mark.parametrize("request_", REQUESTS, ids=lambda message: type(message).__name__)
def test_a_request_of_a_newer_version_is_read(request_: Struct) -> None:
    read = msgspec.json.decode(newer(request_), type=type(request_))
    assert msgspec.structs.replace(read, version=1) == request_
