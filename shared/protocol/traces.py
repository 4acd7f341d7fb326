"""Trace contexts of W3C: the headers of requests, and the ids of traces and spans. Pure.

A request keeps the headers `traceparent` and `tracestate` of its client. The ids of spans, and the
trace of a request without these headers, are computed from the id of the request. So all workers
compute the same ids, and a span that is exported twice is the same span.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping

from msgspec import Struct

from shared.protocol.names import PART_MARK, scoped_id, split_id

TRACEPARENT, TRACESTATE = "traceparent", "tracestate"
MAX_STATE_LEN = 512

_PARENT = re.compile(
    r"(?!ff)(?P<version>[0-9a-f]{2})-(?P<trace>(?!0{32})[0-9a-f]{32})"
    r"-(?P<parent>(?!0{16})[0-9a-f]{16})-(?P<flags>[0-9a-f]{2})(?P<more>-.*)?"
)
_BATCH_LINE = re.compile(rf"([^{PART_MARK}]+){PART_MARK}[0-9]+-[0-9]+")
# The last 64 bits of a trace id are compared with the ratio, as OpenTelemetry's samplers do.
_RATIO_BASE = 2**64


class Trace(Struct, frozen=True, omit_defaults=True):
    """Trace of a request, with the id of the request's root span."""

    trace_id: str
    """32 hexadecimal digits."""
    span_id: str
    """16 hexadecimal digits: the root span of the request."""
    accepted_ms: float
    """Time of acceptance, in Unix milliseconds of the broker's clock."""
    parent_id: str = ""
    """Span of the client, 16 hexadecimal digits; empty for a request without `traceparent`."""
    state: str = ""
    """`tracestate` of the client."""
    is_sampled: bool = False

    @property
    def traceparent(self) -> str:
        """Header for spans below the root span."""
        return f"00-{self.trace_id}-{self.span_id}-{self.is_sampled:02x}"


def trace_headers(headers: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the headers of the trace of a request, by lower-case names.

    As W3C specifies, there are none without exactly one valid `traceparent`, and a `tracestate`
    that is invalid is left out.
    """
    values: dict[str, list[str]] = {TRACEPARENT: [], TRACESTATE: []}
    for name, value in headers:
        if (lower := name.lower()) in values:
            values[lower].append(value.strip())
    parents, state = values[TRACEPARENT], ",".join(filter(None, values[TRACESTATE]))
    parent = _PARENT.fullmatch(parents[0]) if len(parents) == 1 else None
    if parent is None or (parent["version"] == "00" and parent["more"] is not None):
        return {}
    is_sampled = int(parent["flags"], 16) & 1
    context = {TRACEPARENT: f"00-{parent['trace']}-{parent['parent']}-{is_sampled:02x}"}
    if state and len(state) <= MAX_STATE_LEN and state.isascii() and state.isprintable():
        context[TRACESTATE] = state
    return context


def trace_of(
    headers: Mapping[str, str], request_id: str, ratio: float, accepted_ms: float = 0.0
) -> Trace | None:
    """Return the trace of a request from its headers, or from its id if the ratio includes it.

    None for any other request. The parts of one request, and the turns of one response, have the
    same trace.
    """
    context = trace_headers(headers.items())
    if not context and not ratio:
        return None
    root = span_id_of(request_id, accepted_ms)
    if context:
        _, trace_id, parent_id, flags = context[TRACEPARENT].split("-")
        state = context.get(TRACESTATE, "")
        return Trace(trace_id, root, accepted_ms, parent_id, state, is_sampled=flags == "01")
    trace_id = trace_id_of(_whole_of(request_id))
    return Trace(trace_id, root, accepted_ms, is_sampled=True) if is_in(trace_id, ratio) else None


def is_in(trace_id: str, ratio: float) -> bool:
    """Return whether a ratio from 0 to 1 includes a trace."""
    return int(trace_id[16:], 16) < ratio * _RATIO_BASE


def batch_of(request_id: str) -> str | None:
    """Return the id of the batch, with its tenant, that a request is a line of."""
    name, tenant = split_id(request_id)
    line = _BATCH_LINE.match(name)
    return None if line is None else scoped_id(line[1], tenant)


def trace_id_of(name: str) -> str:
    return hashlib.blake2s(name.encode(), digest_size=16, person=b"trace").hexdigest()


def span_id_of(*parts: object) -> str:
    """Return the id of a span, which is the same for the same parts."""
    name = " ".join(map(str, parts))
    return hashlib.blake2s(name.encode(), digest_size=8, person=b"span").hexdigest()


def _whole_of(request_id: str) -> str:
    """Return the id of the request, the response, or the line of a batch that an id is part of."""
    name, tenant = split_id(request_id)
    line = _BATCH_LINE.match(name)
    return scoped_id(line[0] if line else name.partition(PART_MARK)[0], tenant)
