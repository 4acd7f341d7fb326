"""A coordinator that probes whether the broker stores."""

import asyncio
import resource

import pytest
from nats.errors import TimeoutError as NatsTimeoutError
from nats.js import JetStreamContext
from structlog.testing import capture_logs

from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.protocol import subjects
from tests.support.waiting import until
from workers.coordinator import store_watch
from workers.coordinator.store_watch import StoreWatch


@pytest.mark.parametrize("patience_s", [0.0, 60.0])
async def test_a_stream_that_refuses_for_long_is_counted_until_it_stores_again(
    patience_s: float,
    own_broker: EmbeddedServer,
    monkeypatch: pytest.MonkeyPatch,
    jetstream: JetStreamContext,
) -> None:
    monkeypatch.setattr(store_watch, "PATIENCE_S", patience_s)
    monkeypatch.setattr(store_watch, "PROBE_S", 0.05)
    bus = await Bus.connect(own_broker.url, "watch")
    await bus.streams.prepare(NatsConfig(), DeliveryConfig())
    watch = StoreWatch(bus)
    with capture_logs() as logs:
        watching = asyncio.create_task(watch.run())
        pid = int(own_broker.pid_file.read_text())
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
        with pytest.raises(NatsTimeoutError):
            await jetstream.publish(subjects.request("demo", "r"), b"1", timeout=0.5)
        await until(lambda: subjects.REQUESTS_STREAM in watch._since_s)
        await until(lambda: patience_s > 0 or watch.num_refusing)
        assert watch.num_refusing == (1 if patience_s == 0 else 0)
        own_broker.end_process()
        own_broker.start()
        await until(lambda: not watch._since_s)
        watching.cancel()
    assert watch.num_refusing == 0
    refused = [log for log in logs if log["event"] == "broker_refuses_to_store"]
    stored = [log for log in logs if log["event"] == "broker_stores_again"]
    if patience_s > 0:
        assert refused == stored == []
    else:
        assert "file too large" in refused[0]["reasons"][subjects.REQUESTS_STREAM]
        assert stored != []
    await bus.close()
