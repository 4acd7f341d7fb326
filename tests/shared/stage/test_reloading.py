"""SIGHUP for a worker without a terminal, as service managers send it."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest
import structlog
from msgspec.structs import replace

from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import ApiKey, Config, DeliveryConfig, GatewayConfig, ModelConfig
from shared.errors import ConfigError
from shared.stage.reloading import Reloader, changed_settings
from shared.telemetry import logs

ROOT = Path(__file__).parents[3]
CONFIG = Config({"demo": ModelConfig("x")})
KEY = ApiKey("alice", "0" * 64)

# It gets the signal to reload while it starts, while it works, and while it drains.
WORKER = """
import asyncio, os, signal, sys
from msgspec.structs import replace
import uvloop
from shared.config.schema import Config, NatsConfig
from shared.stage import runtime

config = Config(models={}, nats=NatsConfig(unchecked=True))
reloads = []

def read():
    reloads.append(len(reloads))
    return replace(config, log_level="debug")

async def reloaded(count):
    os.kill(os.getpid(), signal.SIGHUP)
    while len(reloads) < count:
        await asyncio.sleep(0.01)

async def main(context):
    await reloaded(1)
    context.ready([], dict)
    await reloaded(2)
    assert not context.shutdown.asked.is_set()
    context.shutdown.begin()
    await reloaded(3)
    assert not context.shutdown.hurry.is_set()

sys.exit(uvloop.run(runtime.run("coordinator", main, config, sys.argv[1], None, None, read)))
"""


async def test_a_worker_without_a_terminal_is_not_ended_by_sighup(broker: EmbeddedServer) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-c", WORKER, broker.url],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        start_new_session=True,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('"event": "reloaded"') == 3, done.stderr


START = """
import os, signal
from shared.stage import signals
signals.end_at_once()
os.kill(os.getpid(), signal.SIGHUP)
print("starts")
"""


def test_a_start_without_a_terminal_is_not_ended_by_sighup() -> None:
    done = subprocess.run(
        [sys.executable, "-c", START],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
        start_new_session=True,
    )
    assert done.stdout == "starts\n"


def reloader(now: Config | ConfigError) -> tuple[Reloader, list[Config]]:
    def read() -> Config:
        if isinstance(now, ConfigError):
            raise now
        return now

    configs: list[Config] = []
    instance = Reloader(CONFIG, read, structlog.get_logger())
    instance.takers.append(configs.append)
    return instance, configs


def test_changed_settings_are_named_by_their_keys() -> None:
    delivery = DeliveryConfig(max_queued=1)
    new = replace(CONFIG, gateway=GatewayConfig(api_keys=[KEY]), delivery=delivery)
    assert changed_settings(CONFIG, new) == {"gateway.api_keys", "delivery.max_queued"}
    assert changed_settings(CONFIG, CONFIG) == set()


def test_a_change_that_needs_a_restart_is_named_each_time() -> None:
    new = replace(CONFIG, gateway=GatewayConfig(api_keys=[KEY], max_connections=1))
    instance, configs = reloader(new)
    with structlog.testing.capture_logs() as logged:
        instance.reload()
        instance.reload()
    assert configs == [new, new]
    assert [event["changed"] for event in logged] == [["gateway.api_keys"], []]
    assert [event["needs_restart"] for event in logged] == [["gateway.max_connections"]] * 2


def test_a_configuration_with_an_error_changes_nothing() -> None:
    instance, configs = reloader(ConfigError("no keys", field="gateway.api_keys"))
    with structlog.testing.capture_logs() as logged:
        instance.reload()
    assert configs == []
    assert (logged[0]["event"], logged[0]["field"]) == ("not_reloaded", "gateway.api_keys")


def test_a_level_holds_for_loggers_that_are_in_use(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    request.addfinalizer(structlog.reset_defaults)
    with (tmp_path / "log").open("wb") as file:
        log = logs.configure_logging("warning", file.fileno())
        log.info("one")
        logs.set_level("info")
        log.info("two")
        logs.set_level("error")
        log.warning("three")
    assert [event for event in ("one", "two", "three") if event in file_text(tmp_path)] == ["two"]


def file_text(folder: Path) -> str:
    return (folder / "log").read_text()
