"""Ids of requests from the names that clients choose."""

import pytest
from starlette.requests import Request

from shared.protocol import names
from shared.protocol.messages import MAX_PARTS, RequestRecord
from shared.protocol.steps import painting_id, response_of, turn_id
from workers.gateway.backend.responses import new_response_id
from workers.gateway.core.ids import named_request_id, part_ids
from workers.gateway.openai.chat_assembler import CHAT


@pytest.mark.parametrize("name", ["r", "my-Request_1", "r" * 128])
def test_a_name_that_is_valid_in_a_subject_is_the_id(name: str) -> None:
    assert named_request_id(CHAT, name) == name


@pytest.mark.parametrize("name", ["a b", "a.b", "*", "a@b", "a~0", "item_x", "r" * 129])
def test_any_other_name_has_an_id_that_is_valid(name: str) -> None:
    request_id = named_request_id(CHAT, name)
    assert request_id.startswith("chatcmpl-")
    assert names.is_request_id(request_id)
    assert named_request_id(CHAT, name) == request_id != named_request_id(CHAT, f"{name}2")


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_the_parts_of_a_request_have_valid_ids_of_its_tenant(tenant: str) -> None:
    request_id = names.scoped_id("r" * 128, tenant)
    record = RequestRecord("embedding", "demo", tenant, 0, False, {"parts": MAX_PARTS})
    parts = part_ids(request_id, record)
    assert len(set(parts)) == record.num_parts
    assert all(names.is_scoped_id(part) for part in parts)
    assert {names.split_id(part)[1] for part in parts} == {tenant}


@pytest.mark.parametrize(
    "part",
    [
        names.part_id("r", MAX_PARTS - 1),
        names.part_id("batch_1", "1000000-12"),
        names.part_id(names.part_id("batch_1", "1-0"), 0),
        turn_id("", "resp_1", 32),
        painting_id("", "resp_1", 2, 31),
    ],
)
def test_no_client_can_choose_the_id_of_a_part(part: str) -> None:
    assert names.is_scoped_id(part)
    assert names.is_part_id(part)
    assert not names.is_request_id(part)
    assert named_request_id(CHAT, part).startswith("chatcmpl-")


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_no_client_can_choose_the_id_of_a_job(tenant: str) -> None:
    for job_id in (names.job_id("batch", "r", tenant), names.job_id("response", "r", tenant)):
        assert names.is_job_id(job_id)
        assert names.split_id(job_id)[1] == tenant
        assert not names.is_task_id(job_id)
        assert named_request_id(CHAT, job_id).startswith("chatcmpl-")


@pytest.mark.parametrize("value", ["r", "batch:", "batch:a.b", "batch:*", "batch:r@", "x:r", "r:1"])
def test_other_ids_are_no_jobs(value: str) -> None:
    assert not names.is_job_id(value)


@pytest.mark.parametrize("value", ["r", "~0", "r~", "r~0~", "r~0~1~2", "r~x", "r~A", "item_1~0"])
def test_other_ids_are_no_parts(value: str) -> None:
    assert not names.is_part_id(value)


def test_a_response_is_found_by_the_ids_of_its_parts() -> None:
    ids = turn_id("acme", "resp_1", 32), painting_id("", "resp_1", 2, 31)
    assert {response_of(part) for part in ids} == {"resp_1"}
    others = "resp_1-t0", names.part_id("resp_1", 0), names.part_id("resp_1", "1-0")
    assert {response_of(part) for part in others} == {""}


def test_a_client_cannot_choose_the_id_of_a_lines_response() -> None:
    scope = {"type": "http", "headers": [(b"x-request-id", b"batch_1~1-0")]}
    line, again = ({**scope, "request_id": ("batch_1~1-0", True)} for _ in range(2))
    line_id = new_response_id(Request(line), "acme")
    assert new_response_id(Request(again), "acme") == line_id
    assert new_response_id(Request(scope), "acme") != line_id
