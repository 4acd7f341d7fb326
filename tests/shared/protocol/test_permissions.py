"""The permissions of roles to publish and subscribe."""

import pytest

from shared.protocol import names, subjects
from shared.protocol.permissions import (
    METRICS,
    OPERATOR,
    TENANT_SUBJECTS,
    Permissions,
    inbox_of,
    may_create_streams,
    permissions_of,
    permissions_of_tenant,
)
from workers.roles import all_roles

ROLES = [role.name for role in all_roles()]
STAGE_ROLES = [role.name for role in all_roles() if role.serves_stages]
OTHER_TENANTS = (
    subjects.tokens("r@other"),
    subjects.request("m", "r@other"),
    subjects.cancel("r@other"),
    "pm.request.*",
    "pm.request.*.*.*",
    "pm.tokens.>",
)


def matches(pattern: str, subject: str) -> bool:
    """Whether a permission covers a subject, or all that a wildcard subject can match."""
    ours, theirs = pattern.split("."), subject.split(".")
    for number, token in enumerate(ours):
        if token == ">":
            return len(theirs) > number
        if number >= len(theirs) or theirs[number] == ">":
            return False
        if token != "*" and token != theirs[number]:
            return False
    return len(ours) == len(theirs)


def may_publish(permissions: Permissions, subject: str) -> bool:
    allowed = any(matches(pattern, subject) for pattern in permissions.publish)
    return allowed and not any(matches(p, subject) for p in permissions.never_publish)


def may_subscribe(permissions: Permissions, subject: str) -> bool:
    return any(matches(pattern, subject) for pattern in permissions.subscribe)


@pytest.mark.parametrize("identity", [*ROLES, OPERATOR])
@pytest.mark.parametrize(
    "subject",
    [
        subjects.tokens("r"),
        subjects.tokens("r", "audio"),
        subjects.tokens("r@tenant"),
        subjects.steps("tenant", "r"),
        subjects.stored_batch(subjects.batch_log("tenant", "b")),
    ],
)
def test_live_messages_do_not_look_like_stored_ones(identity: str, subject: str) -> None:
    assert not may_publish(permissions_of(identity), subject)


@pytest.mark.parametrize("identity", [*ROLES, METRICS])
def test_no_worker_reads_the_replies_to_another(identity: str) -> None:
    permissions = permissions_of(identity)
    assert may_subscribe(permissions, f"{inbox_of(identity)}.a.b")
    for other in {*ROLES, OPERATOR, METRICS} - {identity}:
        assert not may_subscribe(permissions, f"{inbox_of(other)}.>")
    for wide in ("_INBOX.>", ">", "$SYS.>", "_R_.>"):
        assert not may_subscribe(permissions, wide)


@pytest.mark.parametrize("identity", ROLES)
def test_only_coordinators_and_operators_make_streams(identity: str) -> None:
    stream = f"$JS.API.STREAM.CREATE.{subjects.TOKENS_STREAM}"
    assert may_publish(permissions_of(identity), stream) == may_create_streams(identity)
    assert may_create_streams(identity) == (identity == "coordinator")


@pytest.mark.parametrize("identity", [*ROLES, OPERATOR])
def test_only_operators_change_streams(identity: str) -> None:
    stream = f"$JS.API.STREAM.UPDATE.{subjects.TOKENS_STREAM}"
    assert may_publish(permissions_of(identity), stream) == (identity == OPERATOR)


@pytest.mark.parametrize(
    "subject",
    [
        subjects.request("m", "r@tenant"),
        subjects.tokens("r@tenant"),
        subjects.append("r@tenant", "audio"),
        subjects.heartbeat("engine-1"),
        f"$JS.API.DIRECT.GET.{subjects.TOKENS_STREAM}",
        f"$JS.API.STREAM.MSG.GET.{subjects.REQUESTS_STREAM}",
        f"$JS.API.STREAM.PURGE.{subjects.STAGES_STREAM}",
        "_INBOX.engine.a",
    ],
)
def test_the_reader_of_metrics_reads_no_answers_and_writes_nothing(subject: str) -> None:
    assert not may_publish(permissions_of(METRICS), subject)


@pytest.mark.parametrize("role", STAGE_ROLES)
def test_workers_of_stages_do_their_work_and_ask_nothing(role: str) -> None:
    permissions = permissions_of(role)
    for subject in (
        subjects.append("r@tenant", "audio"),
        subjects.stage("engine", "org/m", "batch", "r@tenant", 3),
        subjects.attempts("r"),
        subjects.dead("talker", "r"),
        "$JS.ACK.STAGES.engine_m_batch.1.2.3.4.5",
        "$JS.ACK.REQUESTS.coordinator.1.2.3.4.5",
        subjects.heartbeat(f"{role}-1"),
    ):
        assert may_publish(permissions, subject), subject
    for subject in (
        subjects.request("m", "r"),
        subjects.cancel("r"),
        subjects.job("r"),
        subjects.step("tenant", "r"),
        subjects.SCALE_ORDERS,
        "$JS.API.STREAM.DELETE.TOKENS",
        "$JS.API.STREAM.UPDATE.TOKENS",
        "$JS.API.CONSUMER.CREATE.TOKENS",
        f"$JS.API.CONSUMER.MSG.NEXT.{subjects.REQUESTS_STREAM}.coordinator",
        f"$JS.API.DIRECT.GET.{subjects.STEPS_STREAM}",
    ):
        assert not may_publish(permissions, subject), subject


def test_each_other_role_has_further_permissions() -> None:
    own = {
        "gateway": [subjects.request("m", "r@t"), subjects.job("r"), subjects.step("t", "r")],
        "agent": [subjects.request("m", "r@t"), subjects.step("t", "r"), subjects.attempts("r")],
        "batcher": [
            subjects.request("m", "r@t"),
            subjects.job("r"),
            subjects.batch_log("t", "b"),
            subjects.attempts("b"),
            "$JS.ACK.BATCHJOBS.batcher.1.2.3.4.5",
        ],
        "autoscaler": [subjects.SCALE_PLAN],
        "pool": [subjects.scale_report("engine/org/m")],
        "coordinator": [subjects.ended("r"), "$JS.API.CONSUMER.MSG.NEXT.REQUESTS.coordinator"],
    }
    for role in ("gateway", "agent"):
        own[role] += [subjects.reading(call, "r@tenant") for call in subjects.READING_CALLS]
    others = {
        "gateway": [subjects.append("r"), subjects.stage("engine", "m", "batch", "r")],
        "agent": [subjects.append("r"), subjects.stage("engine", "m", "batch", "r")],
        "batcher": [subjects.append("r"), subjects.audit("gateway")],
        "autoscaler": [subjects.append("r"), subjects.request("m", "r"), subjects.SETTINGS + ".x"],
        "pool": [subjects.SCALE_PLAN, subjects.SCALE_ORDERS, subjects.append("r")],
        "coordinator": [subjects.request("m", "r"), subjects.step("t", "r")],
    }
    for role, allowed in own.items():
        permissions = permissions_of(role)
        assert all(may_publish(permissions, subject) for subject in allowed), role
        assert not any(may_publish(permissions, subject) for subject in others[role]), role
    assert not may_publish(permissions_of("gateway"), "pm.request.m")


def test_a_tenants_clients_use_their_own_subjects_alone() -> None:
    permissions = permissions_of_tenant()
    for subject in (
        subjects.request("org/m", "r"),
        subjects.cancel("r"),
        subjects.renderer("card", "m"),
        *(subjects.reading(call, "r") for call in subjects.READING_CALLS),
    ):
        assert may_publish(permissions, subject)
    assert may_subscribe(permissions, subjects.tokens("r", "audio"))
    for subject in (
        *OTHER_TENANTS,
        subjects.tokens("r"),
        subjects.append("r"),
        subjects.stage("engine", "m", "batch", "r"),
        subjects.heartbeat("engine-1"),
        subjects.media("0" * 64),
        subjects.METRICS,
        "$JS.API.STREAM.INFO.TOKENS",
        "$JS.API.DIRECT.GET.TOKENS",
        "$JS.API.CONSUMER.CREATE.TOKENS",
        "$JS.ACK.REQUESTS.coordinator.1.2.3.4.5",
    ):
        assert not may_publish(permissions, subject), subject


def test_each_tenant_subject_is_mapped_to_a_subject_of_the_tenant() -> None:
    for subject in TENANT_SUBJECTS:
        token = f"{names.TENANT_MARK}tenant"
        assert subject.mapped.format(token).split(".")[subject.tenant_position - 1] == token
        if subject.own.startswith("pm."):
            assert subjects.tenant_of(subject.mapped.format(token)) == "tenant"


@pytest.mark.parametrize("name", ["17@mail", "17@t", "item_17", "\u00fc"])
def test_the_log_of_an_invalid_name_is_the_tenants_own(name: str) -> None:
    scoped = names.scoped_id(name, "t")
    assert names.has_own_log(name, "t")
    assert not names.is_scoped_id(scoped)
    assert names.split_id(scoped) == (name, "t")
    assert subjects.append(scoped) == f"pm.append.@t.{name}"
    assert subjects.id_of_log(subjects.tokens(scoped)) == scoped


@pytest.mark.parametrize(
    ("name", "tenant"),
    [("17@t", ""), ("item_17", ""), ("*", ""), ("*", "t"), (">", "t"), ("r", "a@t")],
)
def test_a_name_that_leads_to_another_log_has_none(name: str, tenant: str) -> None:
    assert not names.has_own_log(name, tenant)


@pytest.mark.parametrize("request_id", ["r", "a-b_1"])
@pytest.mark.parametrize("tenant", ["", "t", "a_b-c"])
def test_ids_of_tenants_are_apart_and_found_in_subjects(request_id: str, tenant: str) -> None:
    scoped = names.scoped_id(request_id, tenant)
    assert names.split_id(scoped) == (request_id, tenant)
    assert names.is_scoped_id(scoped)
    assert names.is_request_id(scoped) == (not tenant)
    for subject in (
        subjects.tokens(scoped), subjects.cancel(scoped), subjects.request("org/m", scoped)
    ):  # fmt: skip
        assert subjects.id_in(subject) == scoped
        assert subjects.tenant_of(subject) == tenant
    assert subjects.model_of_request(subjects.request("org/m", scoped)) == "org/m"
    assert subjects.request_id_of(subjects.request("org/m", scoped)) == scoped
    assert subjects.last_token(subjects.attempts(scoped)) == scoped
    assert subjects.id_in(subjects.stage("engine", "m", "batch", scoped)) == scoped


@pytest.mark.parametrize("bad", ["r@", "@t", "r@t@u", "r@a.b", "r@*", "item_x@t", "r@t ", ""])
def test_an_id_with_a_tenant_that_is_none_is_refused(bad: str) -> None:
    assert not names.is_scoped_id(bad)


@pytest.mark.parametrize("subject", ["pm.request.m", "pm.request.@t.m", "pm.request.a.m.r"])
def test_a_request_of_an_older_version_has_no_id(subject: str) -> None:
    assert subjects.request_id_of(subject) is None
    assert subjects.model_of_request(subject) == ""
