"""Every Struct on the wire, by direction.

client → coordinator      GenerateRequest            pm.request.<model>          JSON or msgpack
coordinator → renderer    RenderTask                 pm.stage.renderer.…         msgpack
renderer → engine         EngineTask                 pm.stage.engine.…           envelope
renderer → encoder        EncodeTask                 pm.stage.encoder.…          envelope
encoder → engine          EmbeddingRecord            pm.embedding.<key>          msgpack
anyone → client           TokenChunk | Finish | Failure   pm.tokens.<id>         JSON
any role → operators      DeadLetter                 pm.dead.<role>.<id>         msgpack
any worker → anyone       Attempt                    pm.attempt.<id>             JSON
client → renderer → client   GenerateRequest → RenderedPrompt | Refusal
                                                     pm.render.<model>           envelope | JSON
client → renderer → client   TokenizeRequest → Tokenized | Refusal
                                                     pm.tokenize.<model>         JSON
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

from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from shared.errors import PagemillError
from shared.multimodal import BlobRef, MultiModalKwargsItem
from shared.sampling import SamplingParams

# ---------------------------------------------------------------------------------------------
# client → coordinator

TENANT_HEADER = "Pagemill-Tenant"
"""For whom a request is: a name like a request id; without the header, for nobody in particular.

Nothing that is cached for one tenant is found for another. Whoever may publish requests is trusted
to say for whom: the header is set by what has authenticated the client, and never copied from what
the client has written. A body that names a tenant is refused like any unknown field.
"""


class TextPart(Struct, frozen=True, forbid_unknown_fields=True, tag="text"):
    text: str


class ImageURL(Struct, frozen=True, forbid_unknown_fields=True):
    """`url` is a `data:` URL with base64, `media:` and the SHA-256 of a picture that was stored
    before, or http(s) where the operator allows it."""

    url: str
    detail: Literal["auto", "low", "high"] = "auto"


class ImagePart(Struct, frozen=True, forbid_unknown_fields=True, tag="image_url"):
    image_url: ImageURL


ContentPart = TextPart | ImagePart


class Message(Struct, frozen=True, forbid_unknown_fields=True):
    role: Literal["system", "user", "assistant"]
    content: str | list[ContentPart]


class GenerateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    model: str
    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)]
    sampling_params: SamplingParams | UnsetType = UNSET
    """Fields left out take the model's configured defaults."""
    request_id: str | None = None
    """May be given here or as the `Nats-Msg-Id` header; if both, they must agree."""
    lane: Literal["interactive", "batch"] = "interactive"
    timeout_s: Annotated[float, Meta(gt=0)] | None = None
    """From acceptance to the last record; by default and at most what is configured."""
    adapter: str | None = None
    """One of the model's configured LoRA adapters; without one the model answers as it is."""


# ---------------------------------------------------------------------------------------------
# between workers


class Hop(Struct, frozen=True, array_like=True):
    """One stage of a request's path; times are Unix milliseconds of the broker's clock."""

    role: str
    worker: str
    attempt: int
    received_ms: float
    sent_ms: float


class Acceptance(Struct, frozen=True, array_like=True):
    """What goes with a request from its acceptance to its end.

    The request itself stays in its queue until then; whoever ends it acknowledges it there, by
    `receipt`. Times are Unix milliseconds of the broker's clock.
    """

    accepted_ms: float
    deadline_ms: float
    sequence: int
    """In stream REQUESTS."""
    receipt: str
    tenant: str = ""
    """Part of the key of every cache on the way; see TENANT_HEADER."""


class RenderTask(Struct, frozen=True):
    request_id: str
    model: str
    lane: str
    messages: list[Message]
    sampling_params: SamplingParams
    accepted: Acceptance
    path: list[Hop]
    round: int = 0
    """How often its items have been lost on the way and were made again."""
    adapter: str | None = None


class EngineTask(Struct, frozen=True):
    """A rendered request: expanded token ids, and items whose tensors are in the envelope."""

    request_id: str
    model: str
    lane: str
    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]
    sampling_params: SamplingParams
    accepted: Acceptance
    path: list[Hop]
    round: int = 0
    adapter: str | None = None


class EncodeTask(Struct, frozen=True):
    """A picture for an encoder. All requests that show it at the same time share one task."""

    key: str
    """Names the embeddings, see `shared.embeddings`."""
    model: str
    item: MultiModalKwargsItem
    """Its placeholder counts the embeddings; where these will stand does not matter here."""
    expires_ms: float
    """By then nobody waits for it any more: Unix milliseconds of the broker's clock."""


class EmbeddingRecord(Struct, frozen=True):
    """Where the embeddings of a picture are: a worker's blob, or the shared directory."""

    blob: BlobRef | None


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


class Finish(Struct, frozen=True, tag="finish"):
    """Last record of a log that ended well; each choice's reason came with its last tokens."""

    index: int
    attempt: int
    usage: Usage
    kv_blocks: int
    """The most KV blocks that the request held at one time."""
    path: list[Hop]


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
    path: list[Hop]


LogRecord = TokenChunk | Finish | Failure


# ---------------------------------------------------------------------------------------------
# questions to a renderer, answered at once and without an engine


class TokenizeRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the two: `messages` go through the model's chat template, `prompt` is taken as is."""

    messages: Annotated[list[Message], Meta(min_length=1, max_length=1024)] | None = None
    prompt: str | None = None


class Tokenized(Struct, frozen=True, tag="tokens"):
    """Pictures count with all the tokens that they fill."""

    count: int
    max_model_len: int
    """Prompt and answer together; a prompt with more tokens is not refused here."""
    token_ids: list[int]


class RenderedPrompt(Struct, frozen=True):
    """What an engine would be given: the items' tensors are in the envelope."""

    prompt_token_ids: list[int]
    items: list[MultiModalKwargsItem]


class Refusal(Struct, frozen=True, tag="error"):
    """An answer that is none."""

    error: ErrorInfo


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
    history: list["Attempt"]
    """Who had it in hand before."""
    request: bytes
    """What the client had sent; empty if that cannot be found any more."""
    input: bytes
    """The stage's message, or its beginning where all of it would not fit into a dead letter."""
    input_len: int
    failed_ms: float
    tenant: str = ""


class Attempt(Struct, frozen=True):
    """A worker has taken a request in hand; a second record of it tells how that has ended.

    An attempt that ended well leaves no second record, for there is nothing left to decide.
    """

    role: str
    worker: str
    number: int
    """Of the delivery, from 1."""
    began_ms: float
    log_len: int
    """Records in the token log when it began: a later attempt that finds more knows of progress."""
    outcome: Literal["open", "handed_back", "failed"] = "open"


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
    """A gateway's."""


class MetricSeries(Struct, frozen=True, omit_defaults=True):
    """A number of docs/metrics.md, or a histogram."""

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
_tokenize_from_json = msgspec.json.Decoder(TokenizeRequest)
_tokenize_from_msgpack = msgspec.msgpack.Decoder(TokenizeRequest)
_tokenized = msgspec.json.Decoder(Tokenized | Refusal)
_refusal = msgspec.json.Decoder(Refusal)
_log_record = msgspec.json.Decoder(LogRecord)

_attempt = msgspec.json.Decoder(Attempt)

to_json = msgspec.json.Encoder().encode
to_msgpack = msgspec.msgpack.Encoder().encode


def decode_request(data: bytes) -> GenerateRequest:
    """JSON or msgpack. Raises msgspec.MsgspecError."""
    # JSON objects start with a brace, after white space at most; msgpack maps never do.
    packed = bool(data) and data[0] >= 0x80
    decoder = _request_from_msgpack if packed else _request_from_json
    request: GenerateRequest = decoder.decode(data)
    return request


def decode_tokenize_request(data: bytes) -> TokenizeRequest:
    """JSON or msgpack. Raises msgspec.MsgspecError."""
    packed = bool(data) and data[0] >= 0x80
    decoder = _tokenize_from_msgpack if packed else _tokenize_from_json
    request: TokenizeRequest = decoder.decode(data)
    return request


def decode_tokenized(data: bytes) -> Tokenized | Refusal:
    answer: Tokenized | Refusal = _tokenized.decode(data)
    return answer


def decode_refusal(data: bytes) -> Refusal | None:
    """None for an answer that is none: an envelope does not begin with a brace."""
    refusal: Refusal | None = _refusal.decode(data) if data[:1] == b"{" else None
    return refusal


def decode_log_record(data: bytes) -> LogRecord:
    record: LogRecord = _log_record.decode(data)
    return record


def decode_attempt(data: bytes) -> Attempt:
    attempt: Attempt = _attempt.decode(data)
    return attempt


def error_info(error: PagemillError) -> ErrorInfo:
    return ErrorInfo(
        error.code, error.message, error.field, error.fault, error.retryable, error.retry_after_s
    )
