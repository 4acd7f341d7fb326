"""Attacks on the bus: what clients of tenants, workers and strangers cannot do with it."""

import asyncio
import contextlib
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

import nats
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from nats.aio.client import Client

from shared.bus import request_queue
from shared.bus.bus import Bus
from shared.bus.embedded_server import CONFIG_DIR, EmbeddedServer
from shared.bus.login import Login, TlsFiles, seed_file
from shared.bus.metering import StreamMeter
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import ConfigError, Unavailable
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.permissions import OPERATOR
from shared.protocol.requests import tenant_header
from shared.state.log_reader import LogReader
from shared.state.token_log import LogWriter
from shared.tenants import storage_quotas
from tests.support.broker import create_tenant_queues, running_broker
from tests.support.waiting import until
from workers.keyring import Keyring

CHUNK = b'{"type":"tokens","index":0,"attempt":1,"choices":[]}'
FORGED = b'{"type":"tokens","index":0,"attempt":9,"choices":[]}'


@dataclass
class Site:
    """A broker whose clients need keys."""

    server: EmbeddedServer
    keyring: Keyring

    def login(self, identity: str) -> Login:
        return Login(self.server.url, identity, seed_file(self.keyring.folder, identity))

    async def attacker(self, user: str) -> "Attacker":
        """Connect as a role, or as a tenant's client, with a stock library."""
        file = self.keyring.file_of_tenant(user)
        role = not file.exists()
        attacker = Attacker(user)
        attacker.nc = await nats.connect(
            self.server.url,
            nkeys_seed=str(seed_file(self.keyring.folder, user) if role else file),
            inbox_prefix=f"_INBOX.{user}" if role else "_INBOX",
            error_cb=attacker.on_error,
        )
        return attacker


@dataclass
class Attacker:
    user: str
    errors: list[str] = field(default_factory=list)
    nc: Client = field(init=False)

    async def on_error(self, error: Exception) -> None:
        self.errors.append(str(error))

    async def is_refused(self) -> bool:
        """Whether the server refuses what was sent last."""
        await self.nc.flush()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(5):
                while not any("permissions violation" in error for error in self.errors):  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
        return bool(self.errors)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("site")
    keyring = Keyring(folder / "keys")
    keyring.complete(["a", "b"])
    with running_broker(folder / "nats", accounts_file=keyring.accounts_file) as server:
        yield Site(server, keyring)


@pytest.fixture
async def operator(site: Site) -> AsyncIterator[Bus]:
    bus = await Bus.connect(site.login(OPERATOR), "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    await create_tenant_queues(bus)
    yield bus
    await bus.close()


HEARTBEAT = subjects.heartbeat("engine-1")
TASK = subjects.stage("engine", "demo", "interactive", "r")
PUBLISHED = [
    # Subjects of stored records, for readers.
    *((user, subjects.tokens("r")) for user in ("a", "engine", "gateway", "coordinator", OPERATOR)),
    *((user, subjects.tokens("r@b")) for user in ("a", "engine", "gateway")),
    *((user, subjects.steps("b", "r")) for user in ("a", "agent", "gateway")),
    # Logs, tasks, cancellations and requests of others.
    *(("a", subject) for subject in (subjects.append("r"), subjects.append("r@b"), TASK)),
    *(("a", subject) for subject in (subjects.cancel("r@b"), subjects.request("demo", "r@b"))),
    # Requests without an id.
    *((user, "pm.request.demo") for user in ("a", "gateway")),
    *(
        ("a", subject)
        for subject in (subjects.ended("r"), subjects.job("r"), subjects.attempts("r"))
    ),
    *(("a", subject) for subject in (subjects.media("0" * 64), subjects.result("k"))),
    *(("a", subject) for subject in ("pm.read.@b.r", "pm.state.@b.r", "pm.file.@b.r")),
    *(("engine", subject) for subject in ("pm.read.r", "pm.state.r", "pm.file.r")),
    ("gateway", subjects.append("r")),
    *(("renderer", subject) for subject in (subjects.request("demo", "r"), subjects.cancel("r"))),
    # Messages from workers and to them.
    *(("a", subject) for subject in (HEARTBEAT, subjects.METRICS, subjects.SETTINGS)),
    *(("a", subject) for subject in (subjects.SCALE_ORDERS, subjects.SCALE_PLAN, "pm.blob.x")),
    ("engine", subjects.SCALE_ORDERS),
    # The broker itself.
    *(
        (user, f"$JS.API.{call}")
        for user in ("a", "engine", "gateway")
        for call in ("STREAM.DELETE.TOKENS", "STREAM.UPDATE.TOKENS", "STREAM.LIST")
    ),
    *((user, "$JS.API.STREAM.NAMES") for user in ("a", "engine")),
    *(
        ("engine", f"$JS.API.STREAM.MSG.DELETE.{stream}")
        for stream in ("TOKENS", "CANCELS", "DEAD")
    ),
    *(("engine", f"$JS.API.STREAM.MSG.GET.{stream}") for stream in ("STEPS", "JOBS", "AUDIT")),
    ("coordinator", "$JS.API.STREAM.PURGE.AUDIT"),
    ("coordinator", "$JS.API.STREAM.DELETE.REQUESTS_a"),
    ("gateway", f"pm.request.@a.{subjects.WITH_KEY}.demo.r"),
    ("gateway", f"pm.cancel.@a.{subjects.WITH_KEY}.r"),
    ("a", "$JS.API.DIRECT.GET.TOKENS"),
    ("a", "$JS.API.STREAM.MSG.GET.REQUESTS"),
    ("a", "$JS.API.CONSUMER.CREATE.TOKENS"),
    ("a", "$JS.ACK.REQUESTS.coordinator.1.1.1.1.1"),
    ("gateway", "$JS.API.CONSUMER.MSG.NEXT.STAGES.engine_demo_interactive"),
    ("a", "$SYS.REQ.SERVER.PING.JSZ"),
    *((user, "$SYS.REQ.SERVER.PING.VARZ") for user in ("a", "engine", "gateway")),
    *((user, "$SYS.REQ.SERVER.PING.ACCOUNTZ") for user in ("a", "engine", "gateway")),
]
SUBSCRIBED = [
    *(("a", subject) for subject in (">", "pm.>", "pm.request.>", "pm.append.>", "pm.stage.>")),
    *(("a", subject) for subject in ("$KV.>", "$JS.>", "pm.kv.*", "pm.dead.>")),
    *(("gateway", subject) for subject in ("_INBOX.>", "_INBOX.engine.>", "pm.request.>")),
    *((user, "pm.read.>") for user in ("a", "engine", "gateway")),
    *(("engine", subject) for subject in ("_INBOX.>", "pm.request.>", "pm.steps.>", ">")),
]


@pytest.mark.parametrize(("user", "subject"), PUBLISHED)
async def test_no_user_publishes_in_the_name_of_another(
    site: Site, user: str, subject: str
) -> None:
    attacker = await site.attacker(user)
    await attacker.nc.publish(subject, CHUNK, headers={"Pagemill-Tenant": "b"})
    assert await attacker.is_refused()
    await attacker.nc.close()


@pytest.mark.parametrize(("user", "subject"), SUBSCRIBED)
async def test_no_user_listens_to_others(site: Site, user: str, subject: str) -> None:
    attacker = await site.attacker(user)
    await attacker.nc.subscribe(subject)
    assert await attacker.is_refused()
    await attacker.nc.close()


async def test_a_stranger_is_refused(site: Site) -> None:
    for url in (site.server.url, site.server.url.replace("//", "//pagemill:pagemill@")):
        with pytest.raises(Unavailable, match="refuses this login") as refused:
            await Bus.connect(Login(url), "test", 0.3)
        assert "pagemill:" not in refused.value.message


async def test_a_connection_without_a_login_is_closed(site: Site) -> None:
    """Otherwise silent sockets would take all places for connections."""
    reader, writer = await asyncio.open_connection("127.0.0.1", site.server.port)
    async with asyncio.timeout(60):
        assert b"Authentication Timeout" in await reader.read()
    writer.close()


async def test_a_request_is_of_the_tenant_that_sent_it(site: Site, operator: Bus) -> None:
    a, b = await site.attacker("a"), await site.attacker("b")
    for attacker in (a, b):
        headers = {"Nats-Msg-Id": "same", "Pagemill-Tenant": "b"}
        subject = subjects.request("demo", "same")
        await attacker.nc.request(subject, b"{}", headers=headers, timeout=60)
    queued = [request async for request in request_queue.queued_requests(operator)]
    assert [(request.place.stream, request.request_id) for request in queued] == [
        ("REQUESTS_a", "same@a"), ("REQUESTS_b", "same@b")
    ]  # fmt: skip
    assert not a.errors
    await a.nc.close()
    await b.nc.close()


async def test_those_who_have_to_measure_tenants_may(site: Site, operator: Bus) -> None:
    streams = {"coordinator": storage_quotas.LIMITS, "gateway": storage_quotas.MEDIA_STREAMS}
    headers = tenant_header("a")
    await operator.publish_without_id(subjects.media("f" * 64), b"{}", headers)
    for user, measured in streams.items():
        bus = await Bus.connect(site.login(user), "test")
        tenants = {stream: await StreamMeter(bus).measure_tenants(stream) for stream in measured}
        assert set(tenants[subjects.MEDIA_STREAM]) == {"a"}
        await storage_quotas.publish_exceeded(bus, [])
        assert await storage_quotas.read_exceeded(bus) == []
        await bus.close()


async def test_a_tenant_reads_its_own_logs_alone(site: Site, operator: Bus) -> None:
    a = await site.attacker("a")
    logs = await a.nc.subscribe("pm.tokens.>")
    await a.nc.flush()
    for request_id in ("r2", "r2@b", "r2@a"):
        log = await LogWriter.open(operator, request_id, 1)
        await log.tokens([])
    record = await logs.next_msg(60)
    assert record.subject == "pm.tokens.r2"
    assert (record.headers or {})["Nats-Subject"] == subjects.tokens("r2@a")
    assert not logs.pending_msgs
    direct = "$JS.API.DIRECT.GET.TOKENS.pm.tokens"
    last = await a.nc.request(f"{direct}.r2", timeout=60)
    assert (last.headers or {})["Nats-Subject"] == subjects.tokens("r2@a")
    # A body that asks for another subject is refused, and a subject leads to the tenant's own.
    query = to_json({"last_by_subj": subjects.tokens("r2@b")})
    refused = await a.nc.request(f"{direct}.r2", query, timeout=60)
    assert (refused.headers or {})["Status"] == "408"
    other = await a.nc.request(f"{direct}.@b.r2", timeout=60)
    assert (other.headers or {})["Status"] == "404"
    await a.nc.close()


async def test_a_forged_record_reaches_no_reader(site: Site, operator: Bus) -> None:
    """Neither live, nor because its sequence looks like one of the stream."""
    attackers = [await site.attacker(user) for user in ("a", "b", "engine", "gateway")]
    header = {"Nats-Sequence": "1", "Nats-Time-Stamp": "2026-01-01T00:00:00Z"}
    async with LogReader(operator, "forged", 0) as reader:
        for attacker in attackers:
            await attacker.nc.publish(subjects.tokens("forged"), FORGED, headers=header)
            assert await attacker.is_refused()
            await attacker.nc.close()
        log = await LogWriter.open(operator, "forged", 1)
        await log.tokens([])
        record = await anext(reader.records(at_once=False, timeout_s=20))
        assert record.attempt == 1


@pytest.mark.parametrize(
    ("headers", "data"),
    [
        ({"Status": "999"}, b""),
        ({"Status": "404"}, b"{}"),
        ({"Nats-Sequence": "x", "Nats-Time-Stamp": "never"}, b"\xff"),
        (None, b'{"role": "engine", "worker": "x", "models": ' + b"[" * 10_000),
        (None, b'{"role": "\\ud800", "pid": ' + b"9" * 5_000),
    ],
)
async def test_a_malformed_heartbeat_hides_no_other(
    operator: Bus, headers: dict[str, str] | None, data: bytes
) -> None:
    beat = Heartbeat("renderer", "renderer-1", "1", 1, ["demo"], {})
    await operator.publish_without_id(subjects.heartbeat("aaa"), data, headers)
    await operator.heartbeats.publish("renderer-1", to_json(beat))
    await operator.publish_without_id(subjects.heartbeat("zzz"), data, headers)
    assert await operator.heartbeats.read() == [beat]
    await operator.purge(subjects.WORKERS_STREAM, subjects.WORKERS_FILTER)


async def test_only_the_owner_reads_a_key(site: Site) -> None:
    for file in (*site.keyring.files(), site.keyring.accounts_file):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(site.keyring.folder.stat().st_mode) == 0o700
    public = site.keyring.accounts_file.read_text()
    assert all(file.read_text().strip() not in public for file in site.keyring.files())


async def test_a_replaced_key_is_used_without_a_restart(site: Site, tmp_path: Path) -> None:
    old = tmp_path / "old.nk"
    old.write_bytes(seed_file(site.keyring.folder, "encoder").read_bytes())
    bus = await Bus.connect(site.login("encoder"), "test")
    site.keyring.rotate(["encoder"])
    site.server.reload()
    await until(lambda: bus.connection.nc.stats["reconnects"])
    await bus.heartbeats.publish("encoder-1", b"{}")
    with pytest.raises(Unavailable, match="refuses"):
        await Bus.connect(Login(site.server.url, "encoder", old), "test", 0.3)
    await bus.close()


@pytest.mark.parametrize("content", [None, b"", b"SUnknown", b"\xff\xfe", b"UA" + b"A" * 54])
async def test_a_file_without_a_key_is_named_and_not_shown(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "engine.nk"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match=r"^nats\.keys: .*engine\.nk cannot be used") as refused:
        await Bus.connect(Login("nats://127.0.0.1:9", "engine", file), "test", 0.3)
    assert content is None or len(content) < 3 or content.decode("latin1") not in str(refused.value)


def certificate(folder: Path, name: str, issuer: str | None) -> TlsFiles:
    """Write a key and a certificate, signed by `issuer`, or by itself as an authority."""
    key = ec.generate_private_key(ec.SECP256R1())
    signer, authority = key, name
    if issuer is not None:
        loaded = serialization.load_pem_private_key((folder / f"{issuer}.key").read_bytes(), None)
        assert isinstance(loaded, ec.EllipticCurvePrivateKey)
        signer, authority = loaded, issuer
    began = datetime(2026, 1, 1)
    subject, by = (
        x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, text)])
        for text in (name, authority)
    )
    addresses = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    signed = (
        x509.CertificateBuilder(by, subject, key.public_key(), x509.random_serial_number())
        .not_valid_before(began)
        .not_valid_after(began + timedelta(days=36_500))
        .add_extension(x509.BasicConstraints(ca=issuer is None, path_length=None), critical=True)
        .add_extension(addresses, critical=False)
        .sign(signer, hashes.SHA256())
    )
    (folder / f"{name}.pem").write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
    )
    return TlsFiles(folder / f"{authority}.pem", folder / f"{name}.pem", folder / f"{name}.key")


async def test_both_ends_want_a_certificate_of_their_own_authority(
    site: Site, tmp_path: Path
) -> None:
    certificate(tmp_path, "ours", None)
    certificate(tmp_path, "theirs", None)
    server_files = certificate(tmp_path, "server", "ours")
    client_files = certificate(tmp_path, "client", "ours")
    foreign = certificate(tmp_path, "foreign", "theirs")
    config = tmp_path / "tls.conf"
    settings = (CONFIG_DIR / "nats.conf").read_text()
    config.write_text(
        f'{settings}\ntls {{ cert_file: "{server_files.cert}", key_file: "{server_files.key}",'
        f' ca_file: "{server_files.ca}", verify: true }}\n'
    )
    accounts = site.keyring.accounts_file
    server = EmbeddedServer(tmp_path / "nats", config_file=config, accounts_file=accounts)
    server.start()
    key = seed_file(site.keyring.folder, OPERATOR)
    try:
        bus = await Bus.connect(Login(server.url, OPERATOR, key, client_files), "test")
        await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
        await bus.close()
        for refused in (
            None,
            TlsFiles(client_files.ca),
            TlsFiles(client_files.ca, foreign.cert, foreign.key),
            TlsFiles(foreign.ca, client_files.cert, client_files.key),
        ):
            with pytest.raises(Unavailable):
                await Bus.connect(Login(server.url, OPERATOR, key, refused), "test", 0.3)
        with pytest.raises(ConfigError, match=r"nats\.tls: its files cannot be used"):
            await Bus.connect(Login(server.url, OPERATOR, key, TlsFiles(key)), "test")
    finally:
        server.stop()
