"""Limits of a broker: a coordinator logs the unsuitable ones; memory of the embedded server."""

import re
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from shared.bus.bus import Bus
from shared.bus.embedded_server import COLLECTOR, CONFIG_DIR, MAX_MEMORY_STORE_MIB, EmbeddedServer
from shared.bus.server_settings import find_unsuitable_limits
from shared.config.schema import DeliveryConfig, NatsConfig
from tests.shared.bus.test_streams import SETTINGS_EXPORT, start_server

LIMITS_EXPORT = SETTINGS_EXPORT.replace(
    "exports: [", 'exports: [{ service: "$SYS.REQ.SERVER.PING.VARZ", response_type: stream }, '
).replace(
    "imports: [", 'imports: [{ service: { account: SYS, subject: "$SYS.REQ.SERVER.PING.VARZ" } }, '
)
UNSUITABLE = "max_payload: 8MB\nmax_pending: 64MB\nmax_subscriptions: 100\n"


async def warnings_of(url: str, nats: NatsConfig) -> list[Any]:
    bus = await Bus.connect(url, "test")
    try:
        with capture_logs() as logs:
            await bus.streams.prepare(nats, DeliveryConfig())
    finally:
        await bus.close()
    return [entry for entry in logs if entry["event"] == "broker_limit_unsuitable"]


@pytest.mark.parametrize("unchecked", [False, True], ids=["checked", "unchecked"])
async def test_unsuitable_limits_of_a_server_are_logged(tmp_path: Path, unchecked: bool) -> None:
    store = f'jetstream {{ store_dir: "{tmp_path / "js"}", sync_interval: always }}'
    process, url = start_server(tmp_path, UNSUITABLE + store + LIMITS_EXPORT)
    try:
        logged = await warnings_of(url, NatsConfig(unchecked=unchecked))
    finally:
        process.kill()
        process.wait()
    expected = [] if unchecked else ["max_connections", "max_subscriptions", "max_pending"]
    assert [entry["setting"] for entry in logged] == expected
    for entry, number in zip(logged, (65536, 100, 2**26), strict=False):
        assert f"it is {number};" in entry["reason"]


async def test_a_server_that_hides_its_limits_is_not_checked(tmp_path: Path) -> None:
    store = f'jetstream {{ store_dir: "{tmp_path / "js"}", sync_interval: always }}'
    process, url = start_server(tmp_path, UNSUITABLE + store + SETTINGS_EXPORT)
    try:
        assert await warnings_of(url, NatsConfig()) == []
    finally:
        process.kill()
        process.wait()


async def test_the_embedded_server_has_suitable_limits(own_broker: EmbeddedServer) -> None:
    assert await warnings_of(own_broker.url, NatsConfig()) == []


def test_limits_that_a_server_does_not_report_are_suitable() -> None:
    assert find_unsuitable_limits({}) == {}


def test_the_memory_of_the_embedded_server_has_a_limit() -> None:
    settings = (CONFIG_DIR / "nats.conf").read_text()
    (gigabytes,) = re.findall(r"max_memory_store: (\d+)GB", settings)
    assert int(gigabytes) * 1024 == MAX_MEMORY_STORE_MIB
    (limit,) = re.findall(r"^(\d+)MiB$", COLLECTOR["GOMEMLIMIT"])
    assert int(limit) > MAX_MEMORY_STORE_MIB
