"""Ids of requests from the names that clients choose."""

import pytest

from shared.protocol import names
from shared.protocol.messages import MAX_PARTS, RequestRecord
from workers.gateway.core.ids import MAX_OWN_ID_LEN, named_request_id, part_ids
from workers.gateway.openai.chat_assembler import CHAT


@pytest.mark.parametrize("name", ["r", "my-Request_1", "r" * MAX_OWN_ID_LEN])
def test_a_name_that_is_valid_in_a_subject_is_the_id(name: str) -> None:
    assert named_request_id(CHAT, name) == name


@pytest.mark.parametrize("name", ["a b", "a.b", "*", "a@b", "item_x", "r" * (MAX_OWN_ID_LEN + 1)])
def test_any_other_name_has_an_id_that_is_valid(name: str) -> None:
    request_id = named_request_id(CHAT, name)
    assert request_id.startswith("chatcmpl-")
    assert names.is_request_id(request_id)
    assert named_request_id(CHAT, name) == request_id != named_request_id(CHAT, f"{name}2")


@pytest.mark.parametrize("tenant", ["", "acme"])
def test_the_parts_of_a_request_have_valid_ids_of_its_tenant(tenant: str) -> None:
    request_id = names.scoped_id("r" * MAX_OWN_ID_LEN, tenant)
    record = RequestRecord("embedding", "demo", tenant, 0, False, {"parts": MAX_PARTS})
    parts = part_ids(request_id, record)
    assert len(set(parts)) == record.num_parts
    assert all(names.is_scoped_id(part) for part in parts)
    assert {names.split_id(part)[1] for part in parts} == {tenant}
