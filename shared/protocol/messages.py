"""Messages that are no request, task or log record. This table lists all messages, by direction.

client → coordinator          GenerateRequest              pm.request.<model>       JSON or msgpack
coordinator → renderer        Task[RenderBody]             pm.stage.renderer.…      envelope
renderer → engine             Task[EngineBody]             pm.stage.engine.…        envelope
renderer → prefill → engine   Task[EngineBody]             pm.stage.prefill.…       envelope
renderer → encoder            Task[EncodeBody]             pm.stage.encoder.…       envelope
encoder → engine              ItemResult                   pm.result.<key>          msgpack
generator → generator         CachedImages                 pm.result.image_<key>    msgpack
stages → client               TokenChunk, Finish, Failure  pm.tokens.<id>           JSON
stages → client               MediaChunk, OutputEnd        pm.tokens.<id>.<output>  JSON
stages → stages               OutputEnds                   pm.tokens.<id>.ends      JSON
any role → operators          DeadLetter                   pm.dead.<stage>.<id>     msgpack
any worker → any client       AttemptRecord                pm.attempt.<id>          JSON
gateway → gateways            RequestRecord                pm.job.<id>              JSON
client, renderer → renderer   MediaHead                    pm.media.<sha256>        JSON
client, renderer → renderer   (bytes)                      pm.media.<sha256>.<number>
renderer → renderer           MediaPin                     pm.pin.<id>.<sequence>   msgpack
any worker → any client       Heartbeat, StartReport       bucket pm_workers        JSON
coordinator → any worker      ExceededShares               bucket pm_workers        JSON
autoscaler → actuator         ScalePlan                    bucket pm_scale          JSON
actuator → autoscaler         PoolReport                   bucket pm_scale          JSON
operator → autoscaler         ScaleOrders                  bucket pm_scale          JSON
any client ⇄ every worker     (empty) → WorkerMetrics      pm.metrics               JSON
worker ⇄ one other worker     (empty) → CommonSettings     pm.settings              JSON
any client → coordinator      (empty)                      pm.cancel.<id>
coordinator → workers         (empty)                      pm.ended.<id>

Messages that clients write and read are JSON, so that any language can take part with its own JSON
library. Messages of workers alone are msgpack. Unknown fields in a client's message are refused,
because a misspelt parameter must not be ignored silently. Between workers unknown fields are
ignored: an older reader misses what a newer writer has added, and nothing else.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from shared.protocol.encoding import Versioned, or_none
from shared.protocol.records import ErrorInfo

# A leading autoscaler writes its plan every second. An older plan belongs to no leader any more.
PLAN_AGE_S = 10.0
MAX_PARTS = 64
"""Limit on the prompts of a request, which are requests of their own on the bus."""


class RequestRecord(Struct, frozen=True):
    """What a gateway must know of a request, besides its log, to answer for it."""

    kind: str
    """Name of the kind of answer; each has an endpoint of its own."""
    model: str
    tenant: str
    created_s: int
    """Unix seconds."""
    durable: bool
    """Whether the request continues when the client's connection closes."""
    options: dict[str, Any] = {}
    """Options of the response's shape. `parts` is the number of prompts, from 1 to 64."""
    timeout_s: float = 0.0
    """The request has ended after this time, if it was accepted at all."""
    holders: list[str] = []
    """Client connections whose closing ends the request: worker name, colon, connection."""
    digest: str = ""
    """SHA-256 of the request, if the client chose its id: a repeated id must have the same one."""
    version: int = 1

    def __post_init__(self) -> None:
        parts = self.options.get("parts", 1)
        if type(parts) is not int or not 1 <= parts <= MAX_PARTS:
            raise ValueError(f"Expected options.parts from 1 to {MAX_PARTS}")

    @property
    def num_parts(self) -> int:
        parts: int = self.options.get("parts", 1)
        return parts


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
    """Records of earlier attempts."""
    request: bytes
    """The client's request; empty if it is not stored any more."""
    input: bytes
    """The stage's message, cut to the size of a dead letter."""
    input_len: int
    failed_ms: float
    tenant: str = ""


class AttemptRecord(Versioned, frozen=True):
    """A worker's attempt at a request. A second record of the same attempt says how it ended.

    An attempt that ended well leaves no second record, because nothing is left to decide.
    """

    stage: str
    worker: str
    number: int
    """Number of the delivery, from 1."""
    began_ms: float
    log_len: int
    """Records in the token log at its beginning. More records at a later attempt mean progress."""
    outcome: Literal["open", "requeued", "failed"] = "open"
    model: str = ""
    """Empty in records of coordinators, and of workers before this field."""
    unread: str = ""
    """Why the worker could not read the task, which it has left to a newer one; this is no attempt
    then."""


class CachedImages(Struct, frozen=True):
    """The images of equal requests with a seed, or the claim of the request that paints them."""

    owner: str
    """The request that paints them, or has."""
    images: list[str]
    """`media:` URLs in the order of the images; empty for a claim."""


class MediaHead(Versioned, frozen=True):
    """Head of a stored file. It is written after the file's chunks, and makes the file available.

    The chunks are consecutive bytes of the file, each of any size that fits into a message.
    """

    num_bytes: Annotated[int, Meta(ge=0)]
    num_chunks: Annotated[int, Meta(ge=0, le=1024)]
    chunks: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")] | None = None
    """Name in the chunks' subjects; by default that of the file. A file that is stored while it
    arrives has no name before its end."""
    filename: Annotated[str, Meta(max_length=255)] | None = None
    """What its sender calls the file."""
    purpose: Annotated[str, Meta(max_length=64)] | None = None
    """What its sender wants it for; no effect."""


class PinnedPart(Struct, frozen=True, array_like=True):
    url_hash: str
    """SHA-256 of the URL, which may hold a secret."""
    media: str
    """SHA-256 of the bytes that were fetched from it."""


class MediaPin(Versioned, frozen=True):
    """The files that were fetched for a request, in the order of its parts, for later attempts."""

    parts: list[PinnedPart]


class BlobAddress(Struct, frozen=True):
    """Address from which other workers read a worker's large payloads."""

    host: str
    """Machine and network namespace in which the local socket can be reached."""
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
    reads: tuple[int, int] | None = None
    """The oldest and the newest version of messages that it reads; None for a worker before this
    field."""
    host: str = ""
    """Machine and network namespace of the process; empty for a worker before this field."""

    def may_run_on(self, host: str) -> bool:
        """Return whether the worker runs on this host, also if its host is unknown."""
        own = self.host or ("" if self.blobs is None else self.blobs.host)
        return own in ("", host)


class StartReport(Struct, frozen=True, omit_defaults=True):
    """What a worker that is not ready does, every second until its first heartbeat."""

    role: str
    worker: str
    version: str
    pid: int
    step: str
    """For people, such as `reading weights`."""
    model: str = ""
    """The model that it is going to serve, for a role whose workers serve one model each."""
    stage: str = ""
    """The stage that it is going to serve, where that is not named like its role."""
    done_bytes: int = 0
    """Bytes of weights that it has read."""
    total_bytes: int = 0
    """Bytes of weights in its folder; 0 in a step that reads none."""


class PoolPlan(Struct, frozen=True, omit_defaults=True):
    """What the leading autoscaler wants of one pool, and the figures that it has decided by."""

    wanted: int
    """Workers that the actuator is to have, without those that it drains."""
    drain: list[int] = []
    """Slots of the workers to drain, as far as there are more than `wanted`."""
    give_up: list[int] = []
    """Slots of starting workers that are not waited for any longer."""
    reason: str = ""
    """The rule that has set `wanted`."""
    running: int = 0
    starting: int = 0
    starting_s: float = 0.0
    """Age of the oldest worker that starts."""
    draining: int = 0
    pending: int = 0
    in_flight: int = 0
    oldest_s: float = 0.0
    pinned: int = 0
    actuator: str = ""
    """Name of the actuator whose slots it names, and which obeys it."""

    @property
    def state(self) -> str:
        """What the pool does, in a few words."""
        if self.running:
            return "running"
        if self.starting:
            return f"starting for {self.starting_s:.0f} s"
        if self.draining:
            return "draining"
        return "no worker yet" if self.wanted else "at zero"


class ScalePlan(Struct, frozen=True):
    """The plan of the leading autoscaler. To write it again is to hold the lead."""

    leader: str
    """Worker id; empty after a leader that has stopped."""
    pools: dict[str, PoolPlan]
    paused: bool = False


class WorkerSlot(Struct, frozen=True, omit_defaults=True):
    """One worker that an actuator keeps running."""

    slot: int
    """Number that the worker keeps when its process is replaced."""
    pid: int = 0
    """0 while there is no process."""
    draining: bool = False


class PoolReport(Struct, frozen=True):
    """The workers that an actuator has of one pool, every second and after each change."""

    pool: str
    actuator: str
    """Name of this actuator; only one acts on a pool at a time."""
    host: str
    """Machine and network namespace of the processes, as in `Heartbeat`; empty if they are on
    several. Then the slots are no more than a number of workers."""
    slots: list[WorkerSlot]


class ScaleOrders(Struct, frozen=True):
    """What an operator has set, until it is released."""

    workers: dict[str, int] = {}
    """Workers by pool."""
    paused: bool = False
    """Whether all pools stay as they are."""


class MetricSeries(Struct, frozen=True, omit_defaults=True):
    """A value of a metric of docs/reference/metrics.md, or a histogram."""

    name: str
    """Without the prefix `pagemill_`."""
    labels: dict[str, str]
    value: float
    """The number; for a histogram the sum of its observations."""
    bounds: list[float] = []
    """Upper bounds of a histogram's buckets, ascending and inclusive."""
    counts: list[int] = []
    """Observations by bucket; the last bucket has those above all bounds."""


class WorkerMetrics(Versioned, frozen=True):
    role: str
    worker: str
    series: list[MetricSeries]


class CommonSettings(Versioned, frozen=True):
    """The settings of a worker that all workers need to have in common."""

    worker: str
    settings: dict[str, Any]
    """By key, such as `delivery.ack_wait_s`."""


decode_job_record = msgspec.json.Decoder(RequestRecord).decode
decode_attempt = or_none(msgspec.json.Decoder(AttemptRecord).decode)
decode_heartbeat = or_none(msgspec.json.Decoder(Heartbeat).decode)
decode_start_report = or_none(msgspec.json.Decoder(StartReport).decode)
decode_scale_plan = or_none(msgspec.json.Decoder(ScalePlan).decode)
decode_pool_report = or_none(msgspec.json.Decoder(PoolReport).decode)
decode_scale_orders = or_none(msgspec.json.Decoder(ScaleOrders).decode)
decode_metrics = or_none(msgspec.json.Decoder(WorkerMetrics).decode)
decode_common_settings = or_none(msgspec.json.Decoder(CommonSettings).decode)
decode_media_head = or_none(msgspec.json.Decoder(MediaHead).decode)
decode_cached_images = or_none(msgspec.msgpack.Decoder(CachedImages).decode)
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
