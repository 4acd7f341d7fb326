"""Traces: the spans that a collector gets of requests, also when workers are killed."""

import re
import secrets

import httpx
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from shared.bus.bus import Bus
from shared.client import ask, cancel, new_request_id, publish_request
from shared.protocol.records import Failure, Finish
from shared.telemetry import cluster_snapshot
from tests.cluster.conftest import Cluster, answer, kill, request_text
from tests.support.collector import Collector, attributes_of
from tests.support.waiting import until

LONG = {"ignore_eos": True, "max_tokens": 900, "temperature": 0.0}
PARENT = "00f067aa0ba902b7"


def new_trace(flags: str = "01") -> tuple[str, dict[str, str]]:
    """Return the id of a new trace and its headers."""
    trace_id = secrets.token_hex(16)
    return trace_id, {"traceparent": f"00-{trace_id}-{PARENT}-{flags}", "tracestate": "a=1,b=2"}


async def spans_of(collector: Collector, trace_id: str) -> list[Span]:
    """Wait for the spans of a trace, and return them."""
    await until(lambda: collector.of_trace(trace_id))
    return collector.of_trace(trace_id)


def root_of(spans: list[Span]) -> Span:
    (root,) = [span for span in spans if span.kind == Span.SPAN_KIND_SERVER]
    assert all(span.parent_span_id == root.span_id for span in spans if span is not root)
    assert all(span.trace_state == "a=1,b=2" for span in spans)
    return root


async def test_an_answer_over_http_is_one_trace_with_its_stages(
    cluster: Cluster, collector: Collector
) -> None:
    trace_id, headers = new_trace()
    body = {"model": "demo", "messages": [{"role": "user", "content": "What can you do?"}]}
    async with httpx.AsyncClient(trust_env=False, base_url=cluster.http_url) as http:
        reply = await http.post("/v1/chat/completions", json=body, headers=headers)
        # No context: the request is answered, and is no part of any trace.
        wrong = {"traceparent": f"00-{'0' * 32}-{PARENT}-01"}
        assert (await http.post("/v1/chat/completions", json=body, headers=wrong)).is_success
    usage = reply.json()["usage"]
    spans = await spans_of(collector, trace_id)
    root = root_of(spans)
    assert (root.parent_span_id.hex(), root.name) == (PARENT, "generate_content demo")
    shown = attributes_of(root)
    assert shown["gen_ai.response.id"] == reply.headers["x-request-id"]
    assert shown["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert shown["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    assert [event.name for event in root.events] == ["first_token"]
    runs = [span.name for span in spans if not span.name.endswith(" queue")]
    assert runs == ["generate_content demo", "coordinator", "renderer", "engine"]
    for span in spans:
        assert root.start_time_unix_nano <= span.start_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert not span.links
    logged = [line for line in cluster.log.read_text().splitlines() if '"accepted"' in line]
    assert [f'"trace_id": "{trace_id}"' in line for line in logged].count(True) == 1
    assert not collector.of_trace("0" * 32)
    assert '"traces_not_read"' not in cluster.log.read_text()


async def test_an_engine_and_coordinators_are_killed(
    cluster: Cluster, client: Bus, collector: Collector
) -> None:
    (trace_id, headers), request_id = new_trace(), new_request_id()
    records, request = [], request_text("What can you do?", **LONG)
    engine, coordinator = [await cluster.pid(client, r) for r in ("engine", "coordinator")]
    async for record in ask(client, request, request_id, trace=headers):
        records.append(record)
        if len(records) == 5:
            kill(engine)
            kill(coordinator)
    assert isinstance(records[-1], Finish)
    # Another coordinator is killed when the spans may be on their way.
    kill(await cluster.pid(client, "coordinator"))
    spans = await spans_of(collector, trace_id)
    root = root_of(spans)
    assert attributes_of(root)["gen_ai.response.id"] == request_id
    first, second = [span for span in spans if span.name == "engine"]
    assert attributes_of(first)["pagemill.outcome"] == "lost"
    assert first.status.code == Status.STATUS_CODE_ERROR
    assert attributes_of(second)["pagemill.outcome"] == "done"
    assert [link.span_id for link in second.links] == [first.span_id]
    assert len({span.span_id for span in spans}) == len(spans)


async def test_a_cancelled_request_has_a_trace_and_an_unsampled_one_has_no_spans(
    cluster: Cluster, client: Bus, collector: Collector
) -> None:
    request = request_text("What can you do?", **LONG)
    other_id, unsampled = new_trace("00")
    await answer(client, request_text("What can you do?", max_tokens=1))
    request_id, other = new_request_id(), new_request_id()
    await publish_request(client, request, other, trace=unsampled)
    await cancel(client, other, unsampled)
    trace_id, headers = new_trace()
    async for record in ask(client, request, request_id, trace=headers):
        if record.index == 2:
            await cancel(client, request_id, headers)
        assert not isinstance(record, Finish)
    assert isinstance(record, Failure)
    root = root_of(await spans_of(collector, trace_id))
    assert attributes_of(root)["error.type"] == root.status.message == "cancelled"
    assert not collector.of_trace(other_id)
    for trace in (trace_id, other_id):
        lines = re.findall(rf".*{trace}.*", cluster.log.read_text())
        assert any('"event": "cancelled"' in line for line in lines)


async def test_a_collector_that_does_not_answer_changes_no_request(
    client: Bus, collector: Collector
) -> None:
    async def num_dropped() -> float:
        snapshot = await cluster_snapshot.take_snapshot(client)
        series = cluster_snapshot.to_series(snapshot)
        return sum(each.value for each in series if each.name == "trace_spans_dropped_total")

    collector.is_answering.clear()
    num_requests, before = collector.num_requests, await num_dropped()
    request = request_text("What can you do?", max_tokens=2)
    try:
        records = [r async for r in ask(client, request, new_request_id(), trace=new_trace()[1])]
        await until(lambda: collector.num_requests > num_requests)
        more = [r async for r in ask(client, request, new_request_id(), trace=new_trace()[1])]
        assert isinstance(records[-1], Finish)
        assert isinstance(more[-1], Finish)

        async def are_dropped() -> bool:
            return await num_dropped() > before

        await until(are_dropped)
    finally:
        collector.is_answering.set()
