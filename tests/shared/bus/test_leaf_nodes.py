"""Workers and clients on a leaf node of the brokers, which has no JetStream or another domain."""

import contextlib
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from shared.bus.bus import Bus
from shared.bus.embedded_server import CONFIG_DIR, find_binary, free_port
from shared.bus.login import Login, seed_file
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import Unavailable
from shared.protocol import subjects
from shared.protocol.permissions import OPERATOR
from workers.keyring import Keyring

DOMAIN = "hub"
PAGE = CONFIG_DIR.parent / "docs" / "operate" / "regions.md"
PAGE_BLOCKS = re.compile(r"   ```(?:yaml)?\n(.*?)   ```", re.DOTALL)


class Site:
    """A broker with a domain, and a leaf node."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.keyring = Keyring(folder / "keys", NatsConfig(domain=DOMAIN))
        self.keyring.complete([])
        ports = [free_port() for _ in range(3)]
        self.hub, self.leaf = (f"nats://127.0.0.1:{port}" for port in ports[:2])
        store = (CONFIG_DIR / "nats.conf").read_text()
        store = store.replace("jetstream {", f"jetstream {{\n  domain: {DOMAIN}")
        of_hub, _, of_leaf = PAGE_BLOCKS.findall(PAGE.read_text(encoding="utf-8"))
        self._hub = (
            store.replace("$NATS_PORT", str(ports[0])).replace("$NATS_STORE_DIR", '"hub"')
            + "server_name: hub\ninclude keys/accounts.conf\n"
            + of_hub.replace("0.0.0.0, port: 7422", f"127.0.0.1, port: {ports[2]}")
        )
        of_leaf = of_leaf.replace("broker.example:7422", f"127.0.0.1:{ports[2]}")
        self._leaf = of_leaf.replace("4222", str(ports[1])) + "server_name: leaf\n"

    @contextlib.contextmanager
    def running(self, leaf_settings: str = "") -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            for name, settings in (("hub", self._hub), ("leaf", self._leaf + leaf_settings)):
                (self.folder / f"{name}.conf").write_text(settings)
                process = subprocess.Popen(
                    [find_binary(), "-c", f"{name}.conf", "-l", f"{name}.log"],
                    cwd=self.folder,
                    env={"LEAF_KEY": seed_file(self.keyring.folder, OPERATOR).read_text().strip()},
                )
                stack.callback(process.wait)
                stack.callback(process.kill)
            for url in (self.hub, self.leaf):
                _wait_for(url)
            yield

    def login(self, url: str, identity: str = OPERATOR, domain: str | None = DOMAIN) -> Login:
        return Login(url, identity, seed_file(self.keyring.folder, identity), domain=domain)


def _wait_for(url: str) -> None:
    host, port = url.removeprefix("nats://").split(":")
    deadline = time.monotonic() + 10
    while True:
        with socket.socket() as probe:
            if probe.connect_ex((host, int(port))) == 0:
                return
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return Site(tmp_path)


@pytest.mark.parametrize(
    "leaf_settings", ["", "jetstream { store_dir: leaf, domain: leaf }"], ids=["none", "own"]
)
async def test_streams_of_the_brokers_are_used_through_a_leaf_node(
    site: Site, leaf_settings: str
) -> None:
    with site.running(leaf_settings):
        coordinator = await Bus.connect(site.login(site.hub, "coordinator"), "test")
        engine = await Bus.connect(site.login(site.leaf, "engine"), "test")
        operator = await Bus.connect(site.login(site.hub), "test")
        nats = NatsConfig(url=site.leaf, domain=DOMAIN)
        await coordinator.streams.prepare(nats, DeliveryConfig())
        await engine.streams.prepare(nats, DeliveryConfig())
        assert coordinator.connection.is_alone
        subject = subjects.append("a")
        await engine.publish(subject, b"one", "a:1")
        await engine.heartbeats.publish("a", b"beat")
        assert await operator.read_last(subjects.WORKERS_STREAM, subjects.heartbeat("a"))
        for bus in (coordinator, engine, operator):
            last = await bus.read_last(subjects.TOKENS_STREAM, subjects.tokens("a"))
            assert last is not None
            assert last.data == b"one"
        for bus in (coordinator, engine, operator):
            await bus.close()


async def test_a_leaf_node_without_a_domain_says_what_is_missing(site: Site) -> None:
    with site.running():
        with pytest.raises(Unavailable, match=r"no JetStream.* set nats\.domain"):
            await Bus.connect(site.login(site.leaf, domain=None), "test", 1.0)
        with pytest.raises(Unavailable, match="domain 'other' answers"):
            await Bus.connect(site.login(site.leaf, domain="other"), "test", 1.0)
