"""Request records of gateways, and the encoding of requests."""

import asyncio
import json
import secrets
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from shared.bus.bus import Bus
from shared.errors import DecodeError, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat, RequestRecord
from shared.protocol.requests import GenerateRequest, Message, encode_request
from shared.protocol.sampling import SamplingParams, StructuredOutputs
from shared.protocol.task_messages import RequestTicket
from shared.state import request_registry


async def test_the_first_record_of_a_request_stays(bus: Bus) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    assert await request_registry.find(bus, request_id) is None
    first = RequestRecord("chat", "demo", "a", 1, True, {"tools": ["f"]})
    assert await request_registry.register(bus, request_id, first, "gateway-1:a") == first
    other = RequestRecord("completion", "demo", "a", 2, False)
    assert (
        replace(await request_registry.register(bus, request_id, other, "gateway-2:b"), holders=[])
        == first
    )
    noted = await request_registry.find(bus, request_id)
    assert noted == replace(first, holders=["gateway-1:a", "gateway-2:b"])


async def test_only_the_last_holder_is_alone(bus: Bus) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    note = RequestRecord("chat", "demo", "a", 1, False)
    worker = f"gateway-{secrets.token_hex(4)}"
    await bus.heartbeats.publish(worker, to_json(Heartbeat("gateway", worker, "1", 1, [], {})))
    names = [f"{worker}:{number}" for number in range(6)]
    await asyncio.gather(
        *(request_registry.register(bus, request_id, note, name) for name in names)
    )
    await bus.heartbeats.publish(worker, to_json(Heartbeat("gateway", worker, "1", 1, [], {})))
    alone = await asyncio.gather(
        *(request_registry.unregister(bus, request_id, name) for name in names)
    )
    assert sum(alone) == 1


async def test_a_late_heartbeat_means_alive(bus: Bus) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    note = RequestRecord("chat", "demo", "a", 1, False)
    worker = f"gateway-{secrets.token_hex(4)}"
    for name in (f"{worker}:a", "gateway-alive:b"):
        await request_registry.register(bus, request_id, note, name)
    leaving = asyncio.create_task(request_registry.unregister(bus, request_id, "gateway-alive:b"))
    await asyncio.sleep(0.3)
    await bus.heartbeats.publish(worker, to_json(Heartbeat("gateway", worker, "1", 1, [], {})))
    assert not await leaving


async def test_dead_holders_do_not_count(bus: Bus) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    note = RequestRecord("chat", "demo", "a", 1, False)
    for name in ("gateway-dead:a", "gateway-alive:b"):
        await request_registry.register(bus, request_id, note, name)
    assert await request_registry.unregister(bus, request_id, "gateway-alive:b")


@pytest.mark.parametrize("data", [b"x", b"\xff", b"[]", b'{"kind": 3}'])
async def test_bytes_that_are_no_record_stay_and_their_id_may_be_tried_again(
    bus: Bus, data: bytes
) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    await bus.append(subjects.job(request_id), data, 0)
    note = RequestRecord("chat", "demo", "a", 1, False)
    with capture_logs() as logs, pytest.raises(Unavailable, match=request_id) as caught:
        await request_registry.register(bus, request_id, note, "gateway-1:a")
    assert (caught.value.field, caught.value.retryable) == ("X-Request-Id", True)
    assert [log["event"] for log in logs] == ["request_record_undecodable"]
    with pytest.raises(DecodeError):
        await request_registry.unregister(bus, request_id, "gateway-1:a")
    stored = await bus.read_last(subjects.JOBS_STREAM, subjects.job(request_id))
    assert stored is not None
    assert stored.data == data


def test_a_value_that_was_given_is_sent_though_it_is_a_default() -> None:
    request = GenerateRequest("demo", [Message("user", "a")], SamplingParams(n=1))
    assert json.loads(encode_request(request))["sampling_params"] == {}
    message = json.loads(encode_request(request, {"n": 1}))
    assert message["sampling_params"] == {"n": 1}
    assert msgspec.convert(message, GenerateRequest) == request
    bare = GenerateRequest("demo", [Message("user", "a")])
    assert json.loads(encode_request(bare, {"n": 2}))["sampling_params"] == {"n": 2}


@pytest.mark.parametrize("sampling", [None, {}])
def test_fields_without_a_value_are_not_sent(sampling: dict[str, Any] | None) -> None:
    """An older coordinator refuses fields that it does not know."""
    message = json.loads(encode_request(GenerateRequest("demo", prompt="a"), sampling))
    assert message.keys() - {"sampling_params"} == {"model", "prompt"}


def test_scopes_of_caches_differ_by_tenant_and_salt() -> None:
    def scope(tenant: str, salt: str) -> str:
        return RequestTicket(0, 0, 0, "", tenant, salt).cache_scope

    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("b", "a"), ("ab", ""), ("", "ab")]
    assert len({scope(*pair) for pair in pairs}) == len(pairs)
    assert (scope("a", ""), scope("", "")) == ("a", "")


@pytest.mark.parametrize(
    "fields", [{}, {"regex": "a", "json_object": True}, {"json_object": False}]
)
def test_structured_outputs_are_exactly_one(fields: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError, match="exactly one"):
        msgspec.convert(fields, StructuredOutputs)


@pytest.mark.parametrize(
    "fields", [{"json_schema": {}}, {"json_object": True}, {"regex": "a"}, {"choice": ["a"]}]
)
def test_each_form_of_structured_outputs_is_taken(fields: dict[str, object]) -> None:
    assert msgspec.convert(fields, StructuredOutputs)
