"""The audit log of commands: each act of an operator is recorded, with its end."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import pytest

from shared.bus.bus import Bus
from shared.bus.connection import retry_until
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import Login, seed_file
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import InvalidRequest, NotFound, PagemillError, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json, to_msgpack
from shared.protocol.messages import DeadLetter
from shared.protocol.permissions import OPERATOR
from shared.protocol.records import ErrorInfo
from shared.state import audit_log, dead_letters
from tests.cluster.conftest import ROOT
from tests.support.broker import running_broker
from workers.cli.audited import audited
from workers.cli.commands import keys, scale
from workers.cli.commands.audit import audit
from workers.cli.commands.backup import backup, restore
from workers.cli.commands.dead import drop_letter, requeue_letter
from workers.cli.commands.requests import cancel
from workers.keyring import Keyring


@dataclass
class Site:
    folder: Path
    config: Path
    bus: Bus
    """Connection of the operator, which a rotation breaks for a moment."""
    login: Login


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedServer]:
    folder = tmp_path_factory.mktemp("audit")
    keyring = Keyring(folder / "keys")
    keyring.complete()
    with running_broker(folder / "nats", accounts_file=keyring.accounts_file) as server:
        yield server


@pytest.fixture
async def site(server: EmbeddedServer) -> AsyncIterator[Site]:
    folder = server.store_dir.parent
    nats = {"url": server.url, "keys": str(folder / "keys"), "store_dir": str(server.store_dir)}
    models = {"demo": {"path": str(ROOT / "ops" / "demo_model")}}
    config = folder / "pagemill.yaml"
    config.write_text(json.dumps({"models": models, "nats": nats}))
    login = Login(server.url, OPERATOR, seed_file(folder / "keys", OPERATOR))
    bus = await Bus.connect(login, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield Site(folder, config, bus, login)
    await bus.close()


async def cancel_one(site: Site) -> None:
    await site.bus.publish_without_id(subjects.request("demo", "r1@acme"), b"{}")
    await cancel("r1@acme", config=site.config)


async def write_letter(site: Site, name: str) -> None:
    request = to_json({"model": "demo", "prompt": "?"})
    error = ErrorInfo("poison", "for the test", None, "server", False)
    letter = DeadLetter("engine", "e-1", "0", "s", name, 2, error, "", [], request, b"", 0, 0.0)
    await site.bus.publish_without_id(subjects.dead("engine", name), to_msgpack(letter))


async def requeue_one(site: Site) -> None:
    await write_letter(site, "r2")
    await requeue_letter("r2", config=site.config)


async def drop_one(site: Site) -> None:
    for _ in range(3):
        await write_letter(site, "r3")
    last, middle, first = [each.key async for each in dead_letters.read_newest(site.bus, 3)]
    await drop_letter(middle, config=site.config)
    assert [each.key async for each in dead_letters.read_newest(site.bus, 3)] == [last, first]
    assert (await dead_letters.find(site.bus, "r3")).key == last
    with pytest.raises(NotFound):
        await dead_letters.find(site.bus, middle)


async def restore_one(site: Site) -> None:
    path = site.folder / "restored"
    await backup(path, config=site.config)
    await restore(path, replace=True, config=site.config)


ACTS: list[tuple[str, str, str, Callable[[Site], Awaitable[object]]]] = [
    ("cancel", "r1@acme", "done", cancel_one),
    ("dead.requeue", "r2", "done", requeue_one),
    ("dead.drop", "r3", "done", drop_one),
    ("scale", "pause", "done", lambda s: scale.scale(pause=True, config=s.config)),
    ("keys.add-tenant", "new", "done", lambda s: keys.add_tenant("new", config=s.config)),
    (
        "keys.add-tenant",
        "new",
        "invalid_request",
        lambda s: keys.add_tenant("new", config=s.config),
    ),
    ("keys.rotate", "engine", "done", lambda s: keys.rotate("engine", config=s.config)),
    ("keys.rotate", "operator", "done", lambda s: keys.rotate("operator", config=s.config)),
    ("keys.remove-tenant", "new", "done", lambda s: keys.remove_tenant("new", config=s.config)),
    ("keys.make", "", "done", lambda s: keys.make_keys(config=s.config)),
    ("backup", "backup.zip", "done", lambda s: backup(s.folder / "backup.zip", config=s.config)),
    ("restore", "restored", "done", restore_one),
]


@pytest.mark.parametrize(("action", "target", "outcome", "act"), ACTS)
async def test_each_act_is_recorded(
    site: Site, action: str, target: str, outcome: str, act: Callable[[Site], Awaitable[object]]
) -> None:
    before, _ = await site.bus.figures.size(subjects.AUDIT_STREAM)
    try:
        await act(site)
    except PagemillError as error:
        assert isinstance(error, NotFound) or error.code in (outcome, "unavailable")  # noqa: PT017
    bus = await Bus.connect(site.login, "after")

    async def read() -> tuple[audit_log.AuditEntry, int]:
        newest = await anext(audit_log.read_newest(bus))
        number, _ = await bus.figures.size(subjects.AUDIT_STREAM)
        return newest, number

    try:
        # A broker that loads other keys answers no request about streams for a moment.
        newest, after = await retry_until(10.0, read, (Unavailable,), "there was no answer")
    finally:
        await bus.close()
    assert (newest.identity, newest.record.action) == (OPERATOR, action)
    assert Path(newest.record.target).name == target
    assert newest.record.outcome == outcome
    assert newest.record.tenant == ("acme" if action == "cancel" else "")
    assert "@" in newest.record.by
    # Nothing that was recorded before is lost, not even by a restore.
    num_acts = 2 if action == "restore" else 1
    assert after == before + num_acts


async def test_a_letter_is_found_by_its_name_without_the_tenant(site: Site) -> None:
    await write_letter(site, "r5@acme")
    assert (await dead_letters.find(site.bus, "r5")).name == "r5@acme"
    await write_letter(site, "r5@other")
    with pytest.raises(InvalidRequest, match="r5@acme, r5@other"):
        await dead_letters.find(site.bus, "r5")


async def test_an_interrupted_act_is_recorded(site: Site) -> None:
    with pytest.raises(KeyboardInterrupt):
        async with audited(site.bus, "migrate", "everything"):
            raise KeyboardInterrupt
    newest = await anext(audit_log.read_newest(site.bus))
    assert (newest.record.action, newest.record.outcome) == ("migrate", "KeyboardInterrupt")


async def listed(
    site: Site, capsys: pytest.CaptureFixture[str], **filters: object
) -> list[dict[str, object]]:
    capsys.readouterr()
    await audit(json=True, config=site.config, **filters)  # type: ignore[arg-type]
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


async def test_the_list_is_filtered(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    for action, tenant in (("migrate", ""), ("cancel", "other"), ("cancel", "")):
        async with audited(site.bus, action, "listed", tenant):  # type: ignore[arg-type]
            pass
    newest, *_ = everything = await listed(site, capsys, limit=3)
    assert len(everything) == 3
    assert (newest["identity"], newest["record"]["target"]) == (OPERATOR, "listed")  # type: ignore[index]
    assert [e["record"]["tenant"] for e in await listed(site, capsys, tenant="other")] == ["other"]  # type: ignore[index]
    by_action = await listed(site, capsys, action="cancel", limit=2)
    assert {e["record"]["action"] for e in by_action} == {"cancel"}  # type: ignore[index]
    assert await listed(site, capsys, by="nobody") == []
    assert await listed(site, capsys, since=datetime(2100, 1, 1, tzinfo=UTC)) == []
    await audit(limit=1, config=site.config)
    assert "cancel" in capsys.readouterr().out


async def test_keys_are_made_without_a_broker(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "pagemill.yaml"
    models = {"demo": {"path": str(ROOT / "ops" / "demo_model")}}
    nats = {"url": "nats://127.0.0.1:9", "keys": "keys"}
    config.write_text(json.dumps({"models": models, "nats": nats}))
    assert await keys.make_keys(config=config) == 0
    assert (tmp_path / "keys" / "engine.nk").exists()
    assert "not in the audit log" in capsys.readouterr().err.replace("\n", " ")
