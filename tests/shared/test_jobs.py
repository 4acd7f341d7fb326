"""What gateways note of requests, and how a request keeps what was given."""

import asyncio
import json
import secrets

import msgspec
import pytest

from shared import jobs
from shared.bus import Bus
from shared.messages import (
    Acceptance,
    GenerateRequest,
    JobRecord,
    Message,
    encode_request,
)
from shared.sampling import SamplingParams, StructuredOutputs


async def test_the_first_note_of_a_request_stays(bus: Bus) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    assert await jobs.get(bus, request_id) is None
    first = JobRecord("chat", "demo", "a", 1, True, {"tools": ["f"]})
    noted = await jobs.put(bus, request_id, first)
    assert noted is not None
    assert noted.record == first
    other = JobRecord("completion", "demo", "a", 2, False)
    assert await jobs.put(bus, request_id, other) is None
    taken = await jobs.take_over(bus, request_id)
    assert taken is not None
    assert taken.record == first
    assert await jobs.get(bus, request_id) == first


async def test_the_last_of_many_who_claim_a_request_answers_for_it(bus: Bus) -> None:
    request_id = f"job-{secrets.token_hex(6)}"
    assert await jobs.take_over(bus, request_id) is None
    noted = await jobs.put(bus, request_id, JobRecord("chat", "demo", "a", 1, False))
    many = await asyncio.gather(*(jobs.take_over(bus, request_id) for _ in range(8)))
    claims = [claim for claim in [noted, *many] if claim is not None]
    assert len(claims) > 1
    last = max(claims, key=lambda claim: claim.sequence)
    since = {c.sequence: await jobs.is_claimed_since(bus, request_id, c) for c in claims}
    assert since == {c.sequence: c is not last for c in claims}


def test_a_value_that_was_given_is_sent_though_it_is_a_default() -> None:
    request = GenerateRequest("demo", [Message("user", "a")], SamplingParams(n=1))
    assert json.loads(encode_request(request))["sampling_params"] == {}
    given = json.loads(encode_request(request, {"n": 1}))
    assert given["sampling_params"] == {"n": 1}
    assert msgspec.convert(given, GenerateRequest) == request
    bare = GenerateRequest("demo", [Message("user", "a")])
    assert json.loads(encode_request(bare, {"n": 2}))["sampling_params"] == {"n": 2}


def test_scopes_of_caches_differ_by_tenant_and_salt() -> None:
    def scope(tenant: str, salt: str) -> str:
        return Acceptance(0, 0, 0, "", tenant, salt).cache_scope

    pairs = [("", ""), ("a", ""), ("", "a"), ("a", "b"), ("b", "a"), ("ab", ""), ("", "ab")]
    assert len({scope(*pair) for pair in pairs}) == len(pairs)
    assert (scope("a", ""), scope("", "")) == ("a", "")


@pytest.mark.parametrize("given", [{}, {"regex": "a", "json_object": True}, {"json_object": False}])
def test_structured_outputs_are_exactly_one(given: dict[str, object]) -> None:
    with pytest.raises(msgspec.ValidationError, match="exactly one"):
        msgspec.convert(given, StructuredOutputs)


@pytest.mark.parametrize(
    "given", [{"json_schema": {}}, {"json_object": True}, {"regex": "a"}, {"choice": ["a"]}]
)
def test_each_form_of_structured_outputs_is_taken(given: dict[str, object]) -> None:
    assert msgspec.convert(given, StructuredOutputs)
