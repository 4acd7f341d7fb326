"""Spans of ended requests and batches, as a collector receives them from a coordinator."""

import asyncio
import secrets
import sys

import pytest
import structlog
from nats.js import JetStreamContext
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from shared.bus.bus import Bus
from shared.config.schema import Config, ModelConfig, TracingConfig
from shared.errors import ConfigError, InvalidRequest
from shared.protocol import subjects
from shared.protocol.batch_log import BatchBegun
from shared.protocol.encoding import to_json
from shared.protocol.messages import AttemptRecord
from shared.protocol.traces import trace_of
from shared.stage.runtime import Context
from shared.state import batch_log
from shared.state.token_log import end_request
from tests.support.collector import attributes_of, running_collector
from tests.support.waiting import until
from workers.coordinator.trace_spans import batch_context
from workers.coordinator.traces import Traces


def context(bus: Bus, url: str) -> Context:
    config = Config({"demo": ModelConfig("nowhere")}, tracing=TracingConfig(url))
    return Context("coordinator", "coordinator-1", "", config, bus, structlog.get_logger())


async def test_a_request_that_was_accepted_twice_and_a_batch_have_one_root_span_each(
    bus: Bus, jetstream: JetStreamContext
) -> None:
    request_id, batch_id = f"r-{secrets.token_hex(8)}", f"batch_{secrets.token_hex(8)}"
    trace = trace_of({}, request_id, 1.0, bus.now_ms())
    assert trace is not None
    now_s = int(bus.now_ms() / 1000)
    begun = BatchBegun(batch_id, "acme", "/v1/embeddings", "0" * 64, now_s, "1h", now_s, now_s + 60)
    with running_collector() as collector:
        run = context(bus, collector.url)
        traces = asyncio.create_task(Traces(run).run())
        for worker in ("coordinator-1", "coordinator-2"):
            record = AttemptRecord(
                "coordinator", worker, 1, bus.now_ms(), 0, model="demo", trace=trace
            )
            await bus.publish_without_id(subjects.attempts(request_id), to_json(record))
        await batch_log.refuse(bus, begun, InvalidRequest("no lines", field="input_file_id"))
        await end_request(bus, request_id, 1, InvalidRequest("no", field="model"), [])
        trace_id, _ = batch_context(f"{batch_id}@acme")
        await until(lambda: collector.of_trace(trace.trace_id) and collector.of_trace(trace_id))
        # Both messages about the request are settled, and no others are left in the consumer.
        await until(lambda: all_settled(jetstream))
        run.shutdown.begin()
        await traces
    request = collector.of_trace(trace.trace_id)
    names = [span.name for span in request if not span.name.endswith(" queue")]
    assert names == ["generate_content demo", "coordinator", "coordinator"]
    (batch,) = collector.of_trace(trace_id)
    assert (batch.name, batch.kind) == ("batch", Span.SPAN_KIND_SERVER)
    assert attributes_of(batch)["pagemill.batch.status"] == "failed"


async def all_settled(jetstream: JetStreamContext) -> bool:
    info = await jetstream.consumer_info(subjects.ATTEMPTS_STREAM, subjects.TRACES_CONSUMER)
    return not info.num_pending and not info.num_ack_pending


def test_an_exporter_that_is_not_installed_is_named(
    bus: Bus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "workers.coordinator.trace_export", raising=False)
    missing = "opentelemetry.exporter.otlp.proto.http.trace_exporter"
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"pagemill\[otel\]"):
        Traces(context(bus, "http://127.0.0.1:9/v1/traces"))
