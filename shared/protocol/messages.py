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

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import InvalidRequest, PagemillError
from shared.protocol.multimodal import IMAGE, BlobRef, Modality, MultiModalKwargsItem, content_hash
from shared.protocol.sampling import SamplingParams, TokenId
from shared.protocol.subjects import MAX_NAME_LEN, is_name

# ---------------------------------------------------------------------------------------------
# client → coordinator

TENANT_HEADER = "Pagemill-Tenant"
"""For whom a request is: a name like a request id; without the header, for nobody in particular.

Nothing that is cached for one tenant is found for another. Whoever may publish requests is trusted
to say for whom: the header is set by what has authenticated the client, and never copied from what
the client has written. A body that names a tenant is refused like any unknown field.
"""


def tenant_of(header: str | None) -> str:
    """For whom a request is, by its TENANT_HEADER; "" without one.

    Whoever may publish requests is trusted in this. Raises InvalidRequest for what is no name: were
    it taken for none, a slip in one gateway would put its tenants together with everybody else.
    """
    if header is None:
        return ""
    if not is_name(header):
        raise InvalidRequest(
            f"the header {TENANT_HEADER} must be 1 to {MAX_NAME_LEN} letters, digits, '-' or '_'",
            field=TENANT_HEADER,
        )
    return header


def tenant_header(tenant: str) -> dict[str, str]:
    """As headers of a message; none for nobody in particular."""
    return {TENANT_HEADER: tenant} if tenant else {}


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImageURL(Struct, frozen=True, forbid_unknown_fields=True):
    """`url` is a `data:` URL with base64, `media:` and the SHA-256 of a picture that was stored
    before, or http(s) where the operator allows it."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="image_url"):
    modality: ClassVar[Modality] = IMAGE
    url_field: ClassVar[str] = "image_url.url"
    image_url: ImageURL

    @property
    def url(self) -> str:
        return self.image_url.url


ContentPart = TextPart | ImagePart


class FunctionCall(Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    arguments: str
    """JSON text, as the model wrote it."""


class ToolCall(Struct, frozen=True, forbid_unknown_fields=True):
    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class FunctionDefinition(Struct, frozen=True, forbid_unknown_fields=True):
    name: Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    """JSON schema of the arguments."""
    strict: bool | None = None


class Tool(Struct, frozen=True, forbid_unknown_fields=True):
    function: FunctionDefinition
    type: Literal["function"] = "function"


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    """None only beside `tool_calls`."""
    tool_calls: list[ToolCall] = []
    """Of the assistant."""
    tool_call_id: str | None = None
    """Of a tool: the call that this is the result of."""
    name: str | None = None


Messages = Annotated[list[Message], Meta(min_length=1, max_length=1024)]
TokenIds = Annotated[list[TokenId], Meta(min_length=1)]
Tools = Annotated[list[Tool], Meta(max_length=128)]


class Feature(Struct, frozen=True, forbid_unknown_fields=True):
    """A picture that somebody else has processed, and where in the prompt its tokens are."""

    modality: Modality
    mm_hash: Annotated[str, Meta(min_length=1, max_length=128)]
    """Whatever the client calls it by; our caches do not trust it."""
    offset: Annotated[int, Meta(ge=0, le=2**31 - 1)]
    length: Annotated[int, Meta(gt=0, le=2**31 - 1)]
    data: Annotated[str, Meta(pattern="^media:[0-9a-f]{64}$")] | None = None
    """Names the item's bytes, stored like a picture; None for an item that the same tenant has sent
    before under the same `mm_hash`."""


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The prompt is one of three: `messages`, `prompt` or `prompt_token_ids`."""

    model: str
    messages: Messages | None = None
    sampling_params: SamplingParams | UnsetType = UNSET
    """Fields left out take the model's configured defaults."""
    request_id: str | None = None
    """May be given here or as the `Nats-Msg-Id` header; if both, they must agree."""
    lane: Literal["interactive", "batch"] = "interactive"
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """From acceptance to the last record; by default and at most what is configured."""
    adapter: str | None = None
    """One of the model's configured LoRA adapters; without one the model answers as it is."""
    prompt: str | None = None
    """Text as it is, in which the tokenizer may find control tokens."""
    prompt_token_ids: TokenIds | None = None
    """Taken as they are; a picture's tokens are there already, and it itself is in `features`."""
    features: Annotated[list[Feature], Meta(max_length=1024)] = []
    """Only with `prompt_token_ids`."""
    tools: Tools = []
    """Only with `messages`, like `template_kwargs`."""
    template_kwargs: dict[str, Any] = {}
    """Variables of the chat template; `add_generation_prompt` and `continue_final_message` mean
    what they mean in transformers."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer adds its own, such as a BOS. By default it does to a `prompt`, and to
    messages where the model's own processor does."""
    cache_salt: Annotated[str, Meta(min_length=1, max_length=128)] | None = None
    """Nothing that is cached for one salt is found with another, or without one."""
    outputs: Annotated[list[str], Meta(max_length=8)] = []
    """Names of the model's outputs that the request wants; by default its text."""


class Prompt(Struct, frozen=True, omit_defaults=True):
    """What a request asks, checked: one of `messages`, `text` and `token_ids`.

    The other fields mean what those of GenerateRequest mean; see `shared.protocol.prompts`.
    """

    messages: list[Message] = []
    text: str | None = None
    token_ids: list[int] | None = None
    features: list[Feature] = []
    tools: list[Tool] = []
    template_kwargs: dict[str, Any] = {}
    add_special_tokens: bool | None = None


# ---------------------------------------------------------------------------------------------
# between workers

TASK_VERSION = 1
"""Raised when an older worker would misread a task. New optional fields do not raise it: a reader
ignores fields that it does not know."""


class StageSpan(Struct, frozen=True, array_like=True):
    """One stage of a request's path. Times are Unix milliseconds of the broker's clock.

    The span of a fan-out stage is written by the stage that gathers its results: from when that
    stage began to wait until it had all of them.
    """

    stage: str
    worker: str
    """Empty for a fan-out stage, whose items may have been processed by several workers."""
    attempt: int
    received_ms: float
    sent_ms: float


class RequestTicket(Struct, frozen=True, array_like=True):
    """What accompanies a request from its acceptance to its end.

    The request itself stays in its queue until then. The worker that ends it acknowledges it there,
    by `receipt`. Times are Unix milliseconds of the broker's clock.
    """

    accepted_ms: float
    deadline_ms: float
    sequence: int
    """In stream REQUESTS."""
    receipt: str
    tenant: str = ""
    """Part of the key of every cache on the way; see TENANT_HEADER."""
    cache_salt: str = ""
    """Another part of these keys, chosen by the client."""

    @property
    def cache_scope(self) -> str:
        """Tenant and salt in one: nothing cached in one scope is found in another."""
        return content_hash(self.tenant, self.cache_salt) if self.cache_salt else self.tenant


class TaskHeader(Struct, frozen=True, omit_defaults=True):
    """What every stage's task says of its request, or of the item that it is about."""

    request_id: str
    """Of an item task, the item's name; see `shared.protocol.subjects.item_task`."""
    model: str
    lane: str
    ticket: RequestTicket | None = None
    """None for an item task: several requests may wait for its result."""
    sampling: SamplingParams = SamplingParams()
    """All defaults resolved."""
    path: list[StageSpan] = []
    """The stages behind this one."""
    round: int = 0
    """How often payloads of the request have been lost and rendered again."""
    adapter: str | None = None
    outputs: list[str] = []
    """The outputs that the request has, which decide the stages that run; empty for text alone."""
    expires_ms: float = 0.0
    """When nobody waits for the result of an item task any more; by the broker's clock."""
    version: int = TASK_VERSION


class TaskBody(Struct, frozen=True):
    """Base of all task bodies: the part of a task that one role reads."""

    def blobs(self) -> list[BlobRef]:
        """Large payloads that came with the task, released when it is acknowledged."""
        return []


Body = TypeVar("Body")


class Task(Struct, Generic[Body], frozen=True):
    """The message of every stage, as the head of an envelope whose buffers are its tensors."""

    header: TaskHeader
    body: Body


class RenderBody(TaskBody, frozen=True):
    """For renderers: the prompt as the client wrote it."""

    prompt: Prompt


class EngineBody(TaskBody, frozen=True):
    """For engines: expanded token ids, and items whose tensors are in the envelope or in blobs."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]

    def blobs(self) -> list[BlobRef]:
        return [item.blob for item in self.items if item.blob is not None]


class EncodeBody(TaskBody, frozen=True):
    """For encoders: one item. All requests that show it at the same time share one task."""

    key: str
    """Names the embeddings, see `shared.vision.embedding_store`."""
    item: MultiModalKwargsItem
    """Its placeholder counts the embeddings; their position in a prompt does not matter here."""

    def blobs(self) -> list[BlobRef]:
        return [] if self.item.blob is None else [self.item.blob]


class FollowBody(TaskBody, frozen=True):
    """For a stage that follows outputs of other stages: what each carries → the output's name."""

    inputs: dict[str, str]


class ItemResult(Struct, frozen=True):
    """The result of an item task: a worker's blob, small bytes, or neither if it is elsewhere."""

    blob: BlobRef | None = None
    data: bytes | None = None
    version: int = 1


# ---------------------------------------------------------------------------------------------
# the token log


class TokenLogprobs(Struct, frozen=True, array_like=True):
    """Of one token under the model's own distribution, before any sampling parameter has changed
    it: natural logarithms to six decimals, -9999 for none."""

    logprob: float
    rank: int
    """1 for the most probable token."""
    top_token_ids: list[int]
    """As many of the most probable tokens as were asked for, best first."""
    top_logprobs: list[float]


class ChoiceDelta(Struct, frozen=True, omit_defaults=True):
    """New tokens of one choice. `position` is the index of the first of them in the answer."""

    index: int
    position: int
    token_ids: list[int]
    text: str
    """May lag behind the tokens: text that may yet turn out to be a stop string is held back."""
    finish_reason: Literal["stop", "length"] | None = None
    stop_reason: str | int | None = None
    """The stop string or stop token that ended the choice; null for the model's own end."""
    logprobs: list[TokenLogprobs] | None = None
    """One for each of `token_ids`, if the request asks for them."""


class TokenChunk(Struct, frozen=True, omit_defaults=True, tag="tokens"):
    """`index` counts the records of one log from 0 without a gap."""

    index: int
    attempt: int
    choices: list[ChoiceDelta]
    prompt_logprobs: list[TokenLogprobs] | None = None
    """In the first record, if the request asks for them: one for each token of the prompt but the
    first, which nothing comes before."""


class Usage(Struct, frozen=True):
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0
    """Of the prompt's: those that did not have to be computed, for an earlier request had been."""


class OutputSummary(Struct, frozen=True, omit_defaults=True):
    """What is known of an output at its end."""

    usage: Usage | None = None
    """Tokens, for the output that is text."""
    kv_blocks: int = 0
    """The most KV blocks that the stage held for the request at one time."""
    units: dict[str, float] = {}
    """Amounts by name, such as `samples` or `steps`."""
    path: list[StageSpan] = []
    """The stages that led to the output, its own last."""


class Finish(Struct, frozen=True, tag="finish", omit_defaults=True):
    """Last record of a request that ended well; each choice's reason came with its last tokens."""

    index: int
    attempt: int
    usage: Usage
    kv_blocks: int
    """The most KV blocks that the request held at one time."""
    path: list[StageSpan]
    outputs: dict[str, OutputSummary] = {}
    """By name, where the request has other outputs than its text."""


class ErrorInfo(Struct, frozen=True):
    code: str
    message: str
    field: str | None
    fault: Literal["client", "server"]
    retryable: bool
    """Whether the same request may succeed if it is sent again, under another id."""
    retry_after_s: float | None = None


class Failure(Struct, frozen=True, tag="error"):
    """Last record of a log that did not end well."""

    index: int
    attempt: int
    error: ErrorInfo
    path: list[StageSpan]


LogRecord = TokenChunk | Finish | Failure
"""Records of a request's own log, which is also the log of its text."""


class MediaChunk(Struct, frozen=True, tag="media", omit_defaults=True):
    """A piece of an output that is not text."""

    index: int
    attempt: int
    mime: str
    offset: int
    """Where the piece begins, in the output's own unit: bytes, samples, or images."""
    data: str = ""
    """Base64, for small pieces."""
    media: str = ""
    """`media:<sha256>` of a stored file, for large ones."""


class OutputEnd(Struct, frozen=True, tag="end", omit_defaults=True):
    """Last record of an output that has a log of its own."""

    index: int
    attempt: int
    summary: OutputSummary
    cut: bool = False
    """The request was ended before the output was complete."""


OutputRecord = MediaChunk | OutputEnd
"""Records of the log of an output that is not text."""

AnyRecord = LogRecord | OutputRecord


class OutputEnds(Struct, frozen=True, tag="ends"):
    """Which outputs of a request have ended. The stage that completes the list ends the request."""

    expected: list[str]
    ended: dict[str, OutputSummary]


# ---------------------------------------------------------------------------------------------
# between gateways


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


# ---------------------------------------------------------------------------------------------
# beside the road


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


# ---------------------------------------------------------------------------------------------
# bytes


_request_from_json = msgspec.json.Decoder(GenerateRequest)
_request_from_msgpack = msgspec.msgpack.Decoder(GenerateRequest)
_job_record = msgspec.json.Decoder(RequestRecord)

_attempt = msgspec.json.Decoder(AttemptRecord)
_heartbeat = msgspec.json.Decoder(Heartbeat)

to_json = msgspec.json.Encoder().encode
to_msgpack = msgspec.msgpack.Encoder().encode


def encode_request(request: GenerateRequest, sampling: Mapping[str, Any] | None = None) -> bytes:
    """JSON. `sampling` are the parameters that were given, in place of `request`'s.

    A Struct does not tell a value that was given from a default that is equal to it, and the
    model's configured defaults give way to what was given alone.
    """
    if sampling is None:
        return to_json(request)
    return to_json(msgspec.structs.asdict(request) | {"sampling_params": sampling})


def decode_request(data: bytes) -> GenerateRequest:
    """JSON or msgpack. Raises msgspec.MsgspecError."""
    decoder = _request_from_msgpack if is_packed(data) else _request_from_json
    request: GenerateRequest = decoder.decode(data)
    return request


def is_packed(data: bytes) -> bool:
    """JSON objects start with a brace, after white space at most; msgpack maps never do."""
    return bool(data) and data[0] >= 0x80


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


def decode_heartbeat(data: bytes) -> Heartbeat | None:
    """None for bytes that are no heartbeat: anyone may publish on the bus."""
    try:
        beat: Heartbeat = _heartbeat.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return beat


def error_info(error: PagemillError) -> ErrorInfo:
    return ErrorInfo(
        error.code, error.message, error.field, error.fault, error.retryable, error.retry_after_s
    )
