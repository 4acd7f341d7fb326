"""Messages other than requests, tasks and log records. This table lists all messages, by direction.

client → coordinator          GenerateRequest              pm.request.<model>.<id>  JSON or msgpack
coordinator → renderer        Task[RenderBody]             pm.stage.renderer.…      envelope
renderer → engine             Task[EngineBody]             pm.stage.engine.…        envelope
renderer → prefill → engine   Task[EngineBody]             pm.stage.prefill.…       envelope
renderer → encoder            Task[EncodeBody]             pm.stage.encoder.…       envelope
encoder → engine              ItemResult                   pm.result.<key>          msgpack
dit → text_encoder            Task[TextsBody]              pm.stage.text_encoder.…  envelope
dit → vae                     Task[LatentsBody]            pm.stage.vae.…           envelope
text_encoder, vae → dit       ItemResult                   pm.result.<key>          msgpack
generator → generator         CachedImages                 pm.result.image_<key>    msgpack
stages → client               TokenChunk, Finish, Failure  pm.tokens.<id>           JSON
stages → client               MediaChunk, OutputEnd        pm.tokens.<id>.<output>  JSON
stages → stages               OutputEnds                   pm.tokens.<id>.ends      JSON
any role → operators          DeadLetter                   pm.dead.<role>.<job id>  msgpack
any worker → any client       AttemptRecord                pm.attempt.<job id>      JSON
gateway → gateways            RequestRecord                pm.job.<id>              JSON
client, renderer → renderer   MediaHead                    pm.media.<sha256>        JSON
client, renderer → renderer   (bytes)                      pm.media.<sha256>.<number>
gateway → gateways            VideoJob                     pm.media.videos.<tenant>.<id>  JSON
renderer → renderer           MediaPin                     pm.pin.<id>.<sequence>   msgpack
any worker → any client       Heartbeat, StartReport       bucket pm_workers        JSON
coordinator → any worker      ExceededShares               bucket pm_workers        JSON
supervisor → any worker       FullStores                   bucket pm_workers        JSON
autoscaler → actuator         ScalePlan                    bucket pm_scale          JSON
actuator → autoscaler         PoolReport                   bucket pm_scale          JSON
operator → autoscaler         ScaleOrders                  bucket pm_scale          JSON
any client ⇄ every worker     (empty) → WorkerMetrics      pm.metrics               JSON
worker ⇄ one other worker     (empty) → CommonSettings     pm.settings              JSON
any client → coordinator      (empty)                      pm.cancel.<id>
any client ⇄ coordinator      ReadRequest → LogPage        pm.read.<id>             JSON
any client ⇄ coordinator      (empty) → RequestStatus      pm.state.<id>            JSON
any client ⇄ coordinator      FileRequest → FilePage       pm.file.<sha256>         JSON
coordinator → workers         (empty)                      pm.ended.<id>

Messages for clients are JSON, so that clients in any language can write and read them with a JSON
library. Messages between workers are msgpack. Unknown fields in a client's message are refused,
because a misspelt parameter must not be ignored silently. Between workers unknown fields are
ignored, so that an older reader can still read the other fields of a newer writer's message.
"""

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.helpers import patterns
from shared.protocol.encoding import Versioned, or_none
from shared.protocol.records import ErrorInfo
from shared.protocol.traces import Trace
from shared.scaling.memory import Learned

# A leading autoscaler writes its plan every second. An older plan has no leader any more.
PLAN_AGE_S = 10.0
MAX_PARTS = 4096
"""Limit on the prompts of a request, such as the texts of a score. Each prompt is a separate
request on the bus."""


class RequestRecord(Struct, frozen=True):
    """Data that a gateway needs to answer for a request, in addition to its log."""

    kind: str
    """Name of the kind of answer; each kind has a separate endpoint."""
    model: str
    tenant: str
    created_s: int
    """Unix seconds."""
    durable: bool
    """Whether the request continues when the client's connection closes."""
    options: dict[str, Any] = {}
    """Options of the answer's form. `parts` is the number of prompts, from 1 to 4096."""
    timeout_s: float = 0.0
    """Time after which an accepted request has ended."""
    holders: list[str] = []
    """Client connections that end the request when they close: worker name, colon, connection."""
    digest: str = ""
    """SHA-256 of the request, if the client chose its id: a repeated id must have the same one."""
    version: int = 1
    trace: dict[str, str] | UnsetType = UNSET
    """Headers of the client's trace, see `shared.protocol.traces`."""

    def __post_init__(self) -> None:
        parts = self.options.get("parts", 1)
        if type(parts) is not int or not 1 <= parts <= MAX_PARTS:
            raise ValueError(f"options.parts must be 1 to {MAX_PARTS}")

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
    """Id of the job, which is a request, a batch or a response; null for a message without one."""
    attempts: int
    error: ErrorInfo
    traceback: str
    history: list["AttemptRecord"]
    """Records of earlier attempts."""
    request: bytes
    """Request of the client; empty if it is not stored any more."""
    input: bytes
    """Message of the stage, cut to the size of a dead letter."""
    input_len: int
    failed_ms: float
    tenant: str = ""


class AttemptRecord(Versioned, frozen=True):
    """Attempt of a worker at a job. A second record of the same attempt contains its outcome.

    A successful attempt has no second record, because no later attempt depends on it.
    """

    stage: str
    worker: str
    number: int
    """Number of the delivery, from 1."""
    began_ms: float
    log_len: int
    """Records in the token log, or steps of the response, at its beginning. More of them at a later
    attempt mean progress."""
    outcome: Literal["open", "requeued", "failed"] = "open"
    model: str = ""
    """Empty in records of coordinators, and of workers without this field."""
    unread: str = ""
    """Reason why the worker could not read the task and left it to a newer worker. Such a record
    does not count as an attempt."""
    trace: Trace | None = None
    """Trace of a sampled request, in the record of the coordinator that accepted it."""


class CachedImages(Struct, frozen=True):
    """Images of equal requests with a seed, or the claim of the request that paints them."""

    owner: str
    """Id of the request that has painted the images, or is painting them."""
    images: list[str]
    """`media:` URLs in the order of the images; empty for a claim."""


class MediaHead(Versioned, frozen=True):
    """Head of a stored file. It is written after the file's chunks, and makes the file available.

    The chunks are consecutive bytes of the file, each of any size that fits into a message.
    """

    num_bytes: Annotated[int, Meta(ge=0)]
    num_chunks: Annotated[int, Meta(ge=0, le=1024)]
    chunks: Annotated[str, Meta(pattern=patterns.SHA256)] | None = None
    """Name in the subjects of the chunks; by default the file's SHA-256. A file that is stored
    while it arrives needs another name, because its hash is unknown before its end."""
    filename: Annotated[str, Meta(max_length=255)] | None = None
    """File name from the client."""
    purpose: Annotated[str, Meta(max_length=64)] | None = None
    """Purpose from the client; no effect."""
    expires_s: int | None = None
    """Time from which the input file of a batch is not stored any more, in Unix seconds of the
    broker's clock; None for any other file, which each request that names it keeps."""


class VideoJob(Versioned, frozen=True):
    """A video that a client of a gateway has ordered. It exists until it is deleted or expires."""

    model: str
    prompt: str
    output: str
    """Name of the output with the video."""
    size: str
    frames: int
    fps: int
    created_s: int
    """Unix seconds."""
    timeout_s: float
    """Time after which an accepted request has ended."""


class PinnedPart(Struct, frozen=True, array_like=True):
    url_hash: str
    """SHA-256 of the URL. The URL itself may contain a secret."""
    media: str
    """SHA-256 of the bytes that were fetched from the URL."""


class MediaPin(Versioned, frozen=True):
    """Files that were fetched for a request, in the order of its parts, for later attempts."""

    parts: list[PinnedPart]


class BlobAddress(Struct, frozen=True):
    """Address from which other workers read a worker's large payloads."""

    host: str
    """Machine and network namespace in which the local socket can be reached."""
    local: str
    """Name of an abstract Unix socket."""
    tcp: tuple[str, int] | None = None
    """Address and port."""


# The autoscaler measures the work of pools from these figures in the load of heartbeats.
TASKS, TASKS_S = "tasks", "tasks_s"
"""Handled tasks since the start of the worker, and the sum of their times in it."""
PROMPT_TOKENS, PROMPT_SPEED = "prompt_tokens", "prompt_tokens_per_s"
"""Prompt tokens that an engine has claimed and not begun, and its measured speed."""


def rendered_tasks(model: str) -> str:
    """Name of the figure of a renderer: tasks that it has rendered for a model."""
    return f"rendered_tasks/{model}"


def rendered_tokens(model: str) -> str:
    """Name of the figure of a renderer: prompt tokens of these tasks."""
    return f"rendered_tokens/{model}"


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
    """URL of a gateway."""
    stage: str = ""
    """Stage that the worker serves, if its name is not the name of the role."""
    reads: tuple[int, int] | None = None
    """Oldest and newest version of messages that the worker reads; None for workers without this
    field."""
    host: str = ""
    """Machine and network namespace of the process; empty for workers without this field."""

    pool: str = ""
    """Pool of the model's engines, if there are several."""
    hostname: str = ""
    """Name of the machine, or of the pod on Kubernetes."""

    def may_run_on(self, host: str) -> bool:
        """Return whether the worker runs on this host, also if its host is unknown."""
        own = self.host or ("" if self.blobs is None else self.blobs.host)
        return own in ("", host)


class StartReport(Struct, frozen=True, omit_defaults=True):
    """Progress of a starting worker, published every second until its first heartbeat."""

    role: str
    worker: str
    version: str
    pid: int
    step: str
    """Display name of the current step, such as `reading weights`."""
    model: str = ""
    """Model that the worker is going to serve, for roles with one model per worker."""
    stage: str = ""
    """Stage that the worker is going to serve, if its name is not the name of the role."""
    done_bytes: int = 0
    """Bytes of weights that were read."""
    total_bytes: int = 0
    """Bytes of weights in the model's folder; 0 in a step that reads no weights."""
    refused: str = ""
    """Reason why the worker has ended instead: its configuration or its model is refused."""


class PoolPlan(Struct, frozen=True, omit_defaults=True):
    """Plan of the leading autoscaler for one pool, and the figures that it is based on."""

    wanted: int
    """Target number of the actuator's workers, without draining ones."""
    drain: list[int] = []
    """Slots of the workers to drain if there are more than `wanted`."""
    give_up: list[int] = []
    """Slots of starting workers to end, because their start takes too long."""
    reason: str = ""
    """Rule that has decided `wanted`."""
    why: str = ""
    """The decision in one sentence."""
    learned: Learned = Learned()
    """Measurements that a new leader continues with."""
    running: int = 0
    starting: int = 0
    starting_s: float = 0.0
    """Time since the start of the oldest starting worker."""
    draining: int = 0
    pending: int = 0
    in_flight: int = 0
    oldest_s: float = 0.0
    pinned: int = 0
    actuator: str = ""
    """Name of the actuator that the slots belong to, and that follows this plan."""

    @property
    def state(self) -> str:
        """State of the pool in a few words, such as `draining`."""
        if self.running:
            return "running"
        if self.starting:
            return f"starting for {self.starting_s:.0f} s"
        if self.draining:
            return "draining"
        return "no worker yet" if self.wanted else "at zero"


class ScalePlan(Struct, frozen=True):
    """Plan of the leading autoscaler. Each write of the plan also renews the lead."""

    leader: str
    """Worker id; empty after a leader that has stopped."""
    pools: dict[str, PoolPlan]
    paused: bool = False


class WorkerSlot(Struct, frozen=True, omit_defaults=True):
    """Worker that an actuator keeps running."""

    slot: int
    """Number of the worker, which stays the same when its process is replaced."""
    pid: int = 0
    """0 while there is no process."""
    draining: bool = False


class PoolReport(Struct, frozen=True):
    """Workers of an actuator in one pool, published every second and after each change."""

    pool: str
    actuator: str
    """Name of this actuator. Only one actuator acts on a pool at a time."""
    host: str
    """Machine and network namespace of the processes, as in `Heartbeat`; empty if they run on
    several hosts. Then the slots only count the workers."""
    slots: list[WorkerSlot]


class ScaleOrders(Struct, frozen=True):
    """Settings of an operator, until they are released."""

    workers: dict[str, int] = {}
    """Fixed number of workers, by pool."""
    paused: bool = False
    """Whether all pools keep their size."""


class MetricSeries(Struct, frozen=True, omit_defaults=True):
    """Value or histogram of a metric of docs/reference/metrics.md."""

    name: str
    """Without the prefix `pagemill_`."""
    labels: dict[str, str]
    value: float
    """Value; for a histogram the sum of its observations."""
    bounds: list[float] = []
    """Upper bounds of a histogram's buckets, ascending and inclusive."""
    counts: list[int] = []
    """Number of observations by bucket. The last bucket counts values above all bounds."""


class WorkerMetrics(Versioned, frozen=True):
    role: str
    worker: str
    series: list[MetricSeries]


class CommonSettings(Versioned, frozen=True):
    """Settings of a worker that must be the same in all workers."""

    worker: str
    settings: dict[str, Any]
    """Values by key, such as `delivery.ack_wait_s`."""


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
decode_video_job = or_none(msgspec.json.Decoder(VideoJob).decode)
decode_cached_images = or_none(msgspec.msgpack.Decoder(CachedImages).decode)
decode_dead_letter = msgspec.msgpack.Decoder(DeadLetter).decode
