"""The audit log: roles that may write into it; no role may change it."""

import pytest
from nats.js import JetStreamContext
from nats.js.errors import APIError

from shared.bus.bus import Bus
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.audit import AuditRecord
from shared.protocol.permissions import OPERATOR
from shared.state import audit_log
from tests.security.test_bus import Site, operator, site

__all__ = ["operator", "site"]

STREAM = subjects.AUDIT_STREAM
OTHERS = ("a", "engine", "renderer", "agent", "coordinator", "autoscaler")
PUBLISHED = [
    *((role, subjects.audit(name)) for role in OTHERS for name in (OPERATOR, "gateway", role)),
    ("gateway", subjects.audit(OPERATOR)),
    (OPERATOR, subjects.audit("gateway")),
    *(
        (role, f"$JS.API.STREAM.{change}.{STREAM}")
        for role in (*OTHERS, "gateway", OPERATOR)
        for change in ("DELETE", "PURGE", "MSG.DELETE")
    ),
    *((role, f"$JS.API.STREAM.UPDATE.{STREAM}") for role in (*OTHERS, "gateway", OPERATOR)),
    *((role, f"$JS.API.DIRECT.GET.{STREAM}") for role in (*OTHERS, "gateway")),
]


@pytest.mark.parametrize(("role", "subject"), PUBLISHED)
async def test_no_role_writes_as_another_or_changes_the_log(
    site: Site, role: str, subject: str
) -> None:
    attacker = await site.attacker(role)
    await attacker.nc.publish(subject, b"{}")
    assert await attacker.is_refused()
    await attacker.nc.close()


async def test_operators_and_gateways_write_as_themselves(site: Site, operator: Bus) -> None:
    gateway = await Bus.connect(site.login("gateway"), "test")
    await audit_log.write(gateway, "gateway", AuditRecord("approval", "alice", "mcpr_1", "acme"))
    await audit_log.write(operator, OPERATOR, AuditRecord("scale", "root@host", "engine=2"))
    newest = [entry async for entry in audit_log.read_newest(operator)][:2]
    assert [(entry.identity, entry.record.action) for entry in newest] == [
        (OPERATOR, "scale"),
        ("gateway", "approval"),
    ]
    assert abs(newest[0].at_ms - operator.now_ms()) < 60_000
    with pytest.raises(Unavailable):
        await operator.purge(STREAM, subjects.AUDIT_FILTER)
    await gateway.close()


async def test_the_server_itself_deletes_nothing(bus: Bus, jetstream: JetStreamContext) -> None:
    """Also for someone whom no list of subjects holds back."""
    await audit_log.write(bus, OPERATOR, AuditRecord("scale", "root@host"))
    with pytest.raises(APIError, match="delete not permitted"):
        await jetstream.delete_msg(STREAM, 1)
    with pytest.raises(APIError, match="purge not permitted"):
        await jetstream.purge_stream(STREAM)
    config = (await jetstream.stream_info(STREAM)).config
    for taken_back in ({"deny_delete": False}, {"deny_purge": False}):
        with pytest.raises(APIError, match="can not cancel"):
            await jetstream.update_stream(config.evolve(**taken_back))
    assert (await bus.figures.size(STREAM))[0] > 0
