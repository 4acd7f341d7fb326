"""Settings that all workers of a cluster need to have in common."""

import json

import pytest
import structlog
from msgspec.structs import replace

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import (
    Config,
    DeliveryConfig,
    GatewayConfig,
    ModelConfig,
    NatsConfig,
    StageConfig,
)
from shared.protocol import subjects
from shared.stage.common_settings import common_settings, compare_settings, differences

MODEL = ModelConfig("/models/demo", adapters={"blue": "/models/blue"})
CONFIG = Config({"demo": MODEL})


def changed(**fields: object) -> Config:
    return replace(CONFIG, models={"demo": replace(MODEL, **fields)})


def keys_that_differ(other: Config) -> list[str]:
    return differences(common_settings(CONFIG), common_settings(other))


def test_settings_that_must_agree_are_named() -> None:
    assert keys_that_differ(CONFIG) == []
    assert keys_that_differ(changed(tower="encoder")) == ["models.demo.tower"]
    assert keys_that_differ(changed(adapters={})) == ["models.demo.adapters"]
    stages = {"encoder": StageConfig(role="own")}
    assert keys_that_differ(changed(stages=stages)) == ["models.demo.stages"]
    slower = replace(CONFIG, delivery=DeliveryConfig(ack_wait_s=20.0))
    assert keys_that_differ(slower) == ["delivery.ack_wait_s"]
    assert keys_that_differ(replace(CONFIG, nats=NatsConfig(replicas=3))) == ["nats.replicas"]


def test_settings_of_each_machine_may_differ() -> None:
    elsewhere = changed(path="/srv/demo", adapters={"blue": "/srv/blue"}, stages={})
    assert keys_that_differ(elsewhere) == []
    others = {"demo": MODEL, "other": ModelConfig("/models/other")}
    assert keys_that_differ(replace(CONFIG, models=others)) == []
    own = replace(CONFIG, gateway=GatewayConfig(port=1), delivery=DeliveryConfig(drain_s=1.0))
    assert keys_that_differ(own) == []


async def test_the_later_worker_says_what_differs(broker: EmbeddedServer) -> None:
    first, second = [await Bus.connect(broker.url, "test") for _ in range(2)]
    log = structlog.get_logger()
    with structlog.testing.capture_logs() as lines:
        await compare_settings(first, "engine-1", CONFIG, log)
        await compare_settings(first, "engine-2", CONFIG, log)
        assert lines == []
        # The server has the subscription of the first connection before the second one's request.
        await first.connection.nc.flush()
        await compare_settings(second, "renderer-1", changed(dtype="bfloat16"), log)
    (line,) = lines
    assert line.pop("other_worker") in ("engine-1", "engine-2")
    assert line == {
        "event": "setting_differs",
        "log_level": "warning",
        "key": "models.demo.dtype",
        "value": "bfloat16",
        "other_value": "auto",
    }
    for bus in (first, second):
        await bus.close()


@pytest.mark.parametrize(
    ("value", "logged"),
    [
        (b"[" * 600 + b"]" * 600, "must have at most 22 levels of nesting"),
        (b"[" + b",".join([b"1"] * 5000) + b"]", "[" + ",".join(["1"] * 5000) + "]"),
    ],
)
async def test_a_worker_starts_after_any_answer(
    broker: EmbeddedServer, value: bytes, logged: str
) -> None:
    """Any client of the broker may answer."""
    liar, bus = [await Bus.connect(broker.url, "test") for _ in range(2)]
    answer = b'{"worker":"liar","settings":{"delivery.ack_wait_s":' + value + b"}}"

    async def lie(*_: object) -> bytes:
        return answer

    await liar.add_group_responder(subjects.SETTINGS, "liars", lie)
    await liar.connection.nc.flush()
    with structlog.testing.capture_logs() as lines:
        await compare_settings(bus, "engine-1", CONFIG, structlog.get_logger())
    assert [line["other_value"] for line in lines] == [logged]
    json.dumps(lines)
    for connection in (liar, bus):
        await connection.close()
