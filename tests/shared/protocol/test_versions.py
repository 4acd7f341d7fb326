"""Versions of messages between workers: a newer message that an older reader can ignore is read."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from msgspec import Struct

from shared.errors import InvalidRequest, UnsupportedVersion
from shared.protocol import messages, records, renderer_rpc, task_messages
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import BlobRef, MultiModalKwargsItem, PlaceholderRange
from shared.protocol.records import ErrorInfo
from shared.protocol.requests import (
    AudioPart,
    AudioURL,
    EmbeddingParams,
    Feature,
    GenerateRequest,
    Message,
    TextPart,
    VideoPart,
    VideoURL,
    version_of_request,
)
from shared.protocol.versions import (
    VERSION_HEADER,
    WIRE_VERSION,
    check_version,
    needed_version,
    version_header,
    version_of,
)
from shared.state.log_records import decode_record
from tests.shared.protocol.wire_fields import wire_fields

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


RECORD = Path(__file__).with_name("fields_of_version_2.json")
PLACE = PlaceholderRange(0, 1)
VIDEO = VideoPart(VideoURL("data:,"))
MARKED: list[tuple[Any, int]] = [
    (GenerateRequest("m", prompt="a"), 1),
    (GenerateRequest("m", [Message("user", [TextPart("a")])]), 1),
    (GenerateRequest("m", [Message("user", [TextPart("a"), VIDEO])]), 3),
    (GenerateRequest("m", [Message("user", [AudioPart(AudioURL("data:,"))])]), 3),
    (GenerateRequest("m", prompt_token_ids=[1], features=[Feature("image", "a", 0, 1)]), 1),
    (GenerateRequest("m", prompt_token_ids=[1], features=[Feature("video", "a", 0, 1)]), 3),
    (task_messages.TaskHeader("r", "m", "batch"), 1),
    (task_messages.TaskHeader("r", "m", "batch", embedding=EmbeddingParams()), 2),
    (task_messages.EngineBody([1], [MultiModalKwargsItem("image", "a", PLACE)]), 1),
    (task_messages.EngineBody([1], [MultiModalKwargsItem("audio", "a", PLACE)]), 3),
]


@pytest.mark.parametrize(("message", "version"), MARKED)
def test_a_message_needs_the_version_of_the_newest_thing_in_it(message: Any, version: int) -> None:
    assert needed_version(message) == version


def test_parameters_that_are_given_apart_count_too() -> None:
    assert version_of_request(GenerateRequest("m", prompt="a"), {"n": 2}) == 1
    request = GenerateRequest("m", [Message("user", [VIDEO])])
    assert version_of_request(request, {"n": 2}) == 3


def test_fields_that_are_new_since_the_last_release_have_a_version() -> None:
    """An older worker must be able to detect messages that it cannot read.

    A failure names fields or values that version 2 does not know. What may be ignored is marked
    `since(1)`; for all else WIRE_VERSION is raised once after a release, and they are marked with
    it. In a Struct that forbids unknown fields nothing may be ignored.
    """
    fields_by_kind = json.loads(RECORD.read_text())
    for kind, fields in wire_fields(2).items():
        assert kind in fields_by_kind, f"{kind} is new"
        for field, values in fields.items():
            assert field in fields_by_kind[kind], f"{kind}.{field} is new"
            assert set(values) <= set(fields_by_kind[kind][field]), f"{kind}.{field} has new values"


def test_headers_of_versions() -> None:
    assert version_header(1) == {}
    assert version_of(None) == version_of({}) == 1
    assert version_of(version_header(7)) == 7
    for bad in ("", "-1", "seven", "1" * 10, "²"):
        with pytest.raises(InvalidRequest, match="must be a number"):
            version_of({VERSION_HEADER: bad})


def test_a_newer_version_is_refused_with_both_versions() -> None:
    check_version(WIRE_VERSION, "this task")
    with pytest.raises(
        UnsupportedVersion, match="task has version 9, and this worker reads ve"
    ) as e:
        check_version(9, "this task")
    assert (e.value.fault, e.value.retryable) == ("server", True)
