"""Trace contexts: which headers count, and which requests get a trace without them."""

import pytest

from shared.protocol.traces import batch_of, trace_headers, trace_of

TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
VALID = f"00-{TRACE}-{PARENT}-01"


@pytest.mark.parametrize(
    ("value", "read"),
    [
        (VALID, VALID),
        (f" {VALID} ", VALID),
        (f"00-{TRACE}-{PARENT}-00", f"00-{TRACE}-{PARENT}-00"),
        (f"00-{TRACE}-{PARENT}-03", VALID),
        # A version that is not known yet may have more fields.
        (f"cc-{TRACE}-{PARENT}-01-more", VALID),
        (f"00-{TRACE}-{PARENT}-01-more", None),
        (f"cc-{TRACE}-{PARENT}-01more", None),
        (f"ff-{TRACE}-{PARENT}-01", None),
        (f"00-{'0' * 32}-{PARENT}-01", None),
        (f"00-{TRACE}-{'0' * 16}-01", None),
        (f"00-{TRACE.upper()}-{PARENT}-01", None),
        (f"00-{TRACE[1:]}-{PARENT}-01", None),
        (f"00-{TRACE}-{PARENT}", None),
        ("", None),
    ],
)
def test_a_malformed_traceparent_is_no_traceparent(value: str, read: str | None) -> None:
    assert trace_headers([("Traceparent", value)]).get("traceparent") == read


def test_states_are_joined_and_a_wrong_one_is_left_out() -> None:
    parent = ("traceparent", VALID)
    states = [("tracestate", "a=1"), ("x", "y"), ("tracestate", "b=2")]
    assert trace_headers([parent, *states])["tracestate"] == "a=1,b=2"
    assert trace_headers([parent, parent, *states]) == trace_headers(states) == {}
    for wrong in ("a" * 513, "ä=1", "a=\x01"):
        assert trace_headers([parent, ("tracestate", wrong)]) == {"traceparent": VALID}


def test_a_trace_continues_the_trace_of_the_client() -> None:
    trace = trace_of({"Traceparent": VALID, "tracestate": "a=1"}, "req-1@acme", 0.0, 5.0)
    assert trace is not None
    assert (trace.trace_id, trace.parent_id, trace.state) == (TRACE, PARENT, "a=1")
    assert trace.traceparent == f"00-{TRACE}-{trace.span_id}-01"
    unsampled = trace_of({"traceparent": f"00-{TRACE}-{PARENT}-00"}, "req-1@acme", 1.0)
    assert unsampled is not None
    assert not unsampled.is_sampled


def test_the_ratio_decides_on_requests_without_a_trace_by_their_ids() -> None:
    ids = [f"req-{number}" for number in range(200)]
    assert not any(trace_of({}, each, 0.0) for each in ids)
    assert all(trace_of({}, each, 1.0) for each in ids)
    some = [trace_of({"traceparent": "no"}, each, 0.25) for each in ids]
    assert 20 < sum(trace is not None for trace in some) < 80
    assert some == [trace_of({}, each, 0.25) for each in ids]


def test_parts_of_a_request_have_its_trace_and_lines_of_a_batch_have_their_own() -> None:
    def trace_id(request_id: str) -> str:
        trace = trace_of({}, request_id, 1.0)
        assert trace is not None
        return trace.trace_id

    assert trace_id("resp_1@acme") == trace_id("resp_1~0@acme") == trace_id("resp_1~t2@acme")
    assert trace_id("resp_1@acme") != trace_id("resp_1")
    assert trace_id("batch_1~7-1") == trace_id("batch_1~7-1~0") != trace_id("batch_1~8-1")
    assert batch_of("batch_1~7-1~0@acme") == "batch_1@acme"
    assert batch_of("resp_1~t2") is batch_of("req-1") is None
