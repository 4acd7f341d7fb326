"""Every Struct on the wire, by direction. Requests to renderers are in `renderer_rpc`.

client → coordinator      GenerateRequest            pm.request.<model>          JSON or msgpack
coordinator → renderer    Task[RenderBody]           pm.stage.renderer.…         envelope
renderer → engine         Task[EngineBody]           pm.stage.engine.…           envelope
renderer → encoder        Task[EncodeBody]           pm.stage.encoder.…          envelope
encoder → engine          ItemResult                 pm.result.<key>             msgpack
anyone → client           TokenChunk | Finish | Failure   pm.tokens.<id>         JSON
anyone → client           MediaChunk | OutputEnd     pm.tokens.<id>.<output>     JSON
any role → operators      DeadLetter                 pm.dead.<role>.<id>         msgpack
any worker → anyone       Attempt                    pm.attempt.<id>             JSON
gateway → gateways        RequestRecord                  pm.job.<id>                 JSON
client, renderer → renderer   MediaHead              pm.media.<sha256>           JSON
client, renderer → renderer   (bytes)                pm.media.<sha256>.<number>
renderer → renderer       MediaPin                   pm.pin.<id>.<sequence>      msgpack
any worker → anyone       Heartbeat                  bucket pm_workers           JSON
anyone → every worker → anyone   (empty) → WorkerMetrics   pm.metrics             JSON
anyone → coordinator      (empty)                    pm.cancel.<id>
coordinator → holders     (empty)                    pm.ended.<id>

What clients write and read is JSON, so that any language can take part with its own JSON library;
what only workers read is msgpack. Unknown fields in a client's message are refused: a misspelt
parameter must not be ignored in silence.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.records import ErrorInfo


class RequestRecord(Struct, frozen=True):
    """What a gateway must know of a request, besides its log, to answer for it."""

    kind: Literal["chat", "completion", "generate"]
    model: str
    tenant: str
    created_s: int
    """Unix seconds."""
    durable: bool
    """Whether it goes on when the client's connection has closed."""
    options: dict[str, Any] = {}
    """What the answer's shape depends on."""
    timeout_s: float = 0.0
    """The request has ended after it, if it was ever taken."""
    holders: list[str] = []
    """Connections of clients whose leaving ends it, each a worker's name, a colon, and its own."""
    digest: str = ""
    """SHA-256 of what is asked, where the client has named it: who names it again asks the same."""


class DeadLetter(Struct, frozen=True):
    role: str
    worker: str
    version: str
    subject: str
    request_id: str | None
    attempts: int
    error: ErrorInfo
    traceback: str
    history: list["AttemptRecord"]
    """Who had it in hand before."""
    request: bytes
    """What the client had sent; empty if that cannot be found any more."""
    input: bytes
    """The stage's message, or its beginning where all of it would not fit into a dead letter."""
    input_len: int
    failed_ms: float
    tenant: str = ""


class AttemptRecord(Struct, frozen=True):
    """A worker has taken a request in hand; a second record of it tells how that has ended.

    An attempt that ended well leaves no second record, for there is nothing left to decide.
    """

    stage: str
    worker: str
    number: int
    """Of the delivery, from 1."""
    began_ms: float
    log_len: int
    """Records in the token log when it began: a later attempt that finds more knows of progress."""
    outcome: Literal["open", "requeued", "failed"] = "open"
    version: int = 1


class MediaHead(Struct, frozen=True):
    """Written after the chunks of a picture: from then on it is there.

    The chunks are the picture's bytes in a row, of any size that a message may have.
    """

    num_bytes: Annotated[int, Meta(ge=0)]
    num_chunks: Annotated[int, Meta(ge=0, le=1024)]


class PinnedPart(Struct, frozen=True, array_like=True):
    url_hash: str
    """SHA-256 of the URL, which may hold a secret."""
    media: str
    """SHA-256 of the bytes that were fetched from it."""


class MediaPin(Struct, frozen=True):
    """What was fetched for a request, in the order of its parts: later attempts take the same."""

    parts: list[PinnedPart]


class BlobAddress(Struct, frozen=True):
    """Where a worker's large payloads can be had, beside the broker."""

    host: str
    """The machine and its network namespace: where the local socket can be reached at all."""
    local: str
    """Name of an abstract Unix socket."""
    tcp: tuple[str, int] | None = None
    """Address and port."""


class Heartbeat(Struct, frozen=True, omit_defaults=True):
    role: str
    worker: str
    version: str
    pid: int
    models: list[str]
    load: dict[str, float]
    blobs: BlobAddress | None = None
    metrics: tuple[str, int] | None = None
    """Address and port of its HTTP endpoint, if it has one."""
    url: str | None = None
    """Where a gateway serves."""
    stage: str = ""
    """The stage that it serves, where that is not named like its role."""


class MetricSeries(Struct, frozen=True, omit_defaults=True):
    """A value of a metric of docs/reference/metrics.md, or a histogram."""

    name: str
    """Without the prefix `pagemill_`."""
    labels: dict[str, str]
    value: float
    """Of a histogram the sum of what was observed."""
    bounds: list[float] = []
    """Of a histogram's buckets, ascending; each bound is within its bucket."""
    counts: list[int] = []
    """Of a histogram by bucket; the last one is for what is above all bounds."""


class WorkerMetrics(Struct, frozen=True):
    role: str
    worker: str
    series: list[MetricSeries]


_job_record = msgspec.json.Decoder(RequestRecord)


_attempt = msgspec.json.Decoder(AttemptRecord)
_heartbeat = msgspec.json.Decoder(Heartbeat)


def decode_job_record(data: bytes) -> RequestRecord:
    record: RequestRecord = _job_record.decode(data)
    return record


def decode_attempt(data: bytes) -> AttemptRecord | None:
    """None for bytes that are no record of an attempt: anyone may publish on the bus."""
    try:
        attempt: AttemptRecord = _attempt.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return attempt
