"""Schema of `pagemill.yaml`, as Structs; `shared.config_parsing` decodes and checks the file."""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from shared.config_agent import AgentConfig
from shared.config_encoder import EmbeddingsConfig, EncoderConfig
from shared.config_generator import GeneratorConfig
from shared.config_renderer import RendererConfig
from shared.config_scale import ScaleConfig
from shared.config_stages import MAX_SLOTS, Graph, Positive, StageConfig
from shared.native.choices import KernelSetting

Seconds = Annotated[float, Meta(gt=0)]
TenantName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
Weight = Annotated[float, Meta(gt=0, le=1000)]


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The broker and how Pagemill connects to it."""

    url: str | None = None
    """URL of a running server, or comma-separated URLs of several servers of one cluster. Without
    one, `pagemill up` starts an embedded server."""
    password_file: str | None = None
    """File with the password of the users that `url` names without one, relative to the
    configuration file; refused without a `url`."""
    keys: str | None = None
    """Folder of `pagemill keys`, relative to the configuration file: workers read the key of their
    role, commands the operator's. By default `pagemill up` makes it in `store_dir`."""
    tenant_connections: Positive = 16
    """Connections that clients with one tenant's key may have; `pagemill keys` writes the limit."""
    tls_ca: str | None = None
    """Certificates, in PEM format, of the authorities of the server; they turn encryption on."""
    tls_cert: str | None = None
    """Certificate by which the server knows this client, with `tls_key`."""
    tls_key: str | None = None
    """Private key of `tls_cert`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 4222
    """Port of the embedded server on the loopback address; 0 takes a free one."""
    store_dir: str = "data/nats"
    """Directory in which the embedded server stores its streams."""
    connect_timeout_s: Seconds = 10.0
    """Time in which a worker must reach the broker at its start."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Number of replicas of every stream; 3 in a cluster of three."""
    unchecked: bool = False
    """Start even if the server does not report whether it syncs every acknowledged message."""


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One served model."""

    path: str
    """Folder in Hugging Face format, relative to the configuration file."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """In float64 an answer does not depend on the other requests of its batch."""
    quantization: Literal["int8"] | None = None
    """`int8` rounds the linear layers of the decoder to 8 bits while they are read, with one scale
    per output channel. All else keeps `dtype`, which must be `bfloat16` or `float32`; the products
    are fast with `bfloat16` only."""
    max_model_len: Positive | None = None
    """Limit on prompt and answer together, in tokens; by default the model's own limit."""
    max_images: Annotated[int, Meta(ge=0)] = 8
    """Limit on images per request."""
    max_videos: Annotated[int, Meta(ge=0)] = 2
    """Limit on videos per request."""
    max_audios: Annotated[int, Meta(ge=0)] = 4
    """Limit on sounds per request."""
    max_frames: Positive = 768
    """Limit on the frames that are taken of one video."""
    max_frames_mib: Positive = 64
    """Limit on the size of these frames together, after they have been resized."""
    tower: Literal["engine", "encoder"] = "engine"
    """The worker that computes embeddings of media: the engine, or encoders (`pagemill worker
    encoder`), so that the engine loads only the language model."""
    local_tokens: Annotated[int, Meta(ge=0)] = 0
    """With `tower: encoder`, the engine still encodes items of at most this many tokens, and
    therefore loads the tower too."""
    prefill: Literal["engine", "prefill"] = "engine"
    """The worker that computes long prompts: the engine, or prefill workers (`pagemill worker
    prefill`), which give the engine the KV blocks."""
    min_prefill_tokens: Positive = 2048
    """With `prefill: prefill`, prompts of fewer tokens go straight to the engine."""
    pooling: Literal["last", "mean"] | None = None
    """The hidden states that embeddings of prompts are made of: the last token's, or the mean over
    all tokens. By default the folder's `1_Pooling/config.json` decides, and without it, the last
    token."""
    share_embeddings: bool = False
    """Engines with a vision tower store embeddings for one another, and look there before they
    compute any; see `embeddings`."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling parameters of requests that do not set them."""
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """The format of the model's tool calls; by default derived from the chat template."""
    hash_model_id: str | None = None
    """Model name in mm_hashes of media for other servers, the same in all; by default `path`."""
    adapters: dict[str, str] = {}
    """LoRA adapters that a request may name: peft's folders, relative to the configuration file."""
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    """Queues of the model's engines in each lane. With more than 1, requests with the same
    beginning wait in the same one, which one engine serves before the others do."""
    graph: Graph | None = None
    """Further stages that come with the product; by default those of the model's folder."""
    stages: dict[str, StageConfig] = {}
    """Changes and additions to the model's pipeline, by stage name; see `pagemill check`."""


class DeliveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on time, attempts and queued data."""

    default_timeout_s: Seconds = 600.0
    """Time from acceptance to the end, if the request does not set one."""
    max_timeout_s: Seconds = 3000.0
    """The longest timeout that a request may set; must not exceed `token_log_age_s`."""
    ack_wait_s: Seconds = 10.0
    """A worker that reports no progress for this long loses the messages that it has in flight."""
    max_deliver: Positive = 5
    """Attempts of one stage that may fail, or end without a result, before the request fails."""
    max_deaths: Positive = 2
    """Workers of one stage that may die with a request before the request counts as poison."""
    retry_delay_s: Seconds = 0.5
    """Pause before a stage's second attempt; each further one is twice as long, up to 30 s."""
    max_queued: Positive = 10_000
    """Limit on requests that are accepted and have not ended. Further requests are refused."""
    max_request_mib: Positive = 1024
    """Limit on all accepted requests together, with their media. Further requests are refused."""
    max_stage_mib: Positive = 2048
    """Limit on forwarded work, in memory where the broker runs alone. Beyond it, stages wait."""
    max_token_log_mib: Positive = 2048
    """Limit on all token logs together. Beyond it, the oldest are deleted."""
    max_dead_mib: Positive = 512
    """Limit on all dead letters together. Beyond it, the oldest are deleted."""
    max_job_mib: Positive = 128
    """Limit on all request records of gateways together. Beyond it, the oldest are deleted."""
    max_audit_mib: Positive = 64
    """Limit on the audit log. Beyond it, the oldest records are deleted."""
    audit_age_s: Seconds = 31_536_000.0
    """Time for which a record of the audit log is stored."""
    max_media_mib: Positive = 1024
    """Limit on fetched and pinned media together. Beyond it, the oldest are deleted."""
    tokens_per_minute: dict[TenantName, Positive] = {}
    """Limits on the tokens of tenants, prompts included, by the tenant's name; by default none.
    Each coordinator counts those of the requests that it admits."""
    tenant_weights: dict[TenantName, Weight] = {}
    """Weights of the shares of tenants, by default 1: a tenant may fill so many times what others
    and a reserve of a tenth leave free of token logs, media, request records and dead letters, and
    use a busy model so many times as much as others before its requests go to the batch lane."""
    token_log_age_s: Seconds = 3600.0
    """Time for which a token log is stored."""
    token_log_storage: Literal["file", "memory"] = "file"
    """Logs in memory are faster, but are lost with the broker: requests in flight start again, and
    clients may see tokens twice."""
    drain_s: Seconds = 20.0
    """Time in which a worker that drains may finish what it has in flight, and others may fetch its
    payloads; it requeues the rest."""


class BlobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Large payloads, which are transferred outside the messages."""

    inline_kib: Positive = 64
    """Tensors up to this total size are part of the message itself."""
    arena_mib: Positive = 512
    """Memory for the blobs that a worker serves, and as much again for those that it receives."""
    listen: str | None = None
    """Address at which other machines get blobs. Without one, they travel through the broker."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0 takes a free one."""
    advertise: str | None = None
    """Name or address of this machine as other machines see it; by default `listen`, or if that is
    `0.0.0.0` or `::`, the address from which this worker's connection to the broker comes."""


class SpeculativeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: the model checks several drafted tokens in one step.

    Answers stay the same, and are faster where they repeat their prompt or themselves.
    """

    num_tokens: Annotated[int, Meta(ge=0)] = 0
    """The most drafted tokens of a sequence per step. 0 disables it; 8 suits answers that quote."""
    min_ngram: Positive = 2
    """The shortest n-gram, in tokens, that must have occurred before. The tokens that followed its
    earlier occurrence are the draft."""
    max_ngram: Positive = 4
    """The longest n-gram, in tokens, to look up. The longest match wins."""
    max_step_tokens: Positive = 12
    """Drafts fill a step up to this many tokens of all sequences together. A step that already has
    as many gets none. On a CPU a dozen tokens cost little more than one, because the weights are
    read once for all of them; each further token costs its full time. A GPU has room for more."""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The engine: device, KV cache and batches."""

    device: str = "cpu"
    """`cpu`, or `cuda` for an NVIDIA GPU."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads; 0 leaves it to torch."""
    kernels: KernelSetting = "measured"
    """What computes on a CPU. `measured`: the C++ kernels for the models that they support, and for
    each product and attention of the tower what was fastest on this machine; the first starts
    compile and measure. `vector`, `tiles`: the C++ kernels with AVX-512, or with AMX where the
    processor has it. `torch`: no C++ kernels. `pagemill check --kernels` prints what was
    measured."""
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Tokens per KV block; by default 8 on a CPU and 16 on a GPU."""
    num_blocks: Positive | None = None
    """KV blocks in the pool; by default as many as fit into `kv_cache_mib`."""
    kv_cache_mib: Positive = 256
    """Size of the KV cache."""
    prefix_caching: bool = True
    """Cache computed blocks until their memory is needed. Prompts of the same tenant that share a
    prefix reuse them."""
    kv_events: bool = False
    """Publish cached blocks on `pm.kv.<engine>` for routers that route by cached prefix. The events
    include token ids, so a reader of the stream can read prompts."""
    embedding_cache_mib: Annotated[int, Meta(ge=0)] = 64
    """Size of the cache of media embeddings, for media that recur in other prompts; 0 for none."""
    max_num_seqs: Positive = 64
    """Limit on sequences in one batch."""
    max_appends_per_s: Positive = 200
    """Limit on appends to token logs of all requests together; each log gets at most 25, one of
    codes 1. First tokens, ends and codes that complete a chunk are appended at once. Those between
    are batched, so that several share a record and logging takes little time from the model."""
    step_timeout_s: Seconds = 120.0
    """A step that takes longer counts as hung, and the process ends."""
    max_num_batched_tokens: Positive = 2048
    """Limit on the tokens of one step; longer prompts are prefilled in chunks."""
    max_step_ms: Annotated[float, Meta(gt=0)] | None = None
    """Time that a step should take while sequences decode: prompts get what these leave of it, by
    the measured time of a token. Less makes running answers flow, and first tokens come later; by
    default there is no limit."""
    min_prompt_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of `max_step_ms` that prompts get in any case, however many sequences decode."""
    speculative: SpeculativeConfig = SpeculativeConfig()


# Workers of one machine share a configuration, and listen on a port each.
METRICS_PORTS = 64


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Prometheus endpoints over HTTP. `pagemill metrics` reads metrics from the broker without."""

    listen: str | None = None
    """Address on which every worker serves its own metrics, `/health` and `/ready`; without one, no
    worker does."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the first worker; each further worker on this machine takes the next free one. 0
    takes any free port. Heartbeats contain the port."""


Right = Literal["requests", "metrics"]


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """A key of the gateway. `pagemill key` creates one and prints its configuration."""

    name: str
    """Name in logs and metrics; not secret."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """SHA-256 digest of the key. The key itself is not stored."""
    tenant: str | None = None
    """Tenant whose cached and stored data the key can reach, and no other's; by default the key's
    name."""
    rights: tuple[Right, ...] = ("requests",)
    """What the key is good for: `metrics` for `/metrics`, which tells of all tenants' requests, and
    `requests` for all other endpoints."""
    max_requests_per_minute: Positive | None = None
    """Limit on counted requests of this key in a minute, in each gateway; by default none."""
    max_concurrent: Positive | None = None
    """Limit on counted requests of this key at one time, in each gateway; by default none."""


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP gateway: address, keys, limits and optional routes."""

    listen: str = "127.0.0.1"
    """Address on which the gateway serves HTTP."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 takes a free one; the log and the heartbeat contain it."""
    api_keys: list[ApiKey] = []
    """Without keys, every client that can connect may use the gateway."""
    allow_anonymous: bool = False
    """Allow an address other than loopback without keys."""
    hosts: list[Annotated[str, Meta(pattern="^[a-z0-9.:-]+$")]] = []
    """Names, without a port, by which clients may ask the gateway, besides `localhost`, addresses
    of the loopback and the name in `public_url`. By default any name may be asked for, except from
    a gateway without keys on a loopback address, which foreign web pages could reach under names of
    their own."""
    max_connections: Positive = 1024
    """Limit on open connections. Further ones are refused."""
    max_body_mib: Positive = 64
    """Limit on the size of one request body."""
    max_header_kib: Positive = 32
    """Limit on the size of all headers of one request."""
    header_timeout_s: Seconds = 10.0
    """Time in which the headers, or a TLS handshake, must arrive."""
    body_timeout_s: Seconds = 60.0
    """Time in which the complete body must arrive; for a file, any next part of it."""
    upload_timeout_s: Seconds = 600.0
    """Time in which a file must arrive completely."""
    send_timeout_s: Seconds = 60.0
    """Time in which the client must read some of the data that waits to be sent."""
    max_answer_mib: Positive = 256
    """Limit on the log probabilities or embeddings of an answer that is not streamed. Four of the
    largest may be in progress."""
    public_url: Annotated[str, Meta(pattern="^https?://")] | None = None
    """Address at which clients reach the gateway, for the URLs of images; by default what the Host
    header of a request says."""
    cors_origins: list[str] = []
    """Origins whose web pages may call the gateway, such as `https://chat.example`."""
    tls_cert: str | None = None
    """Certificate chain in PEM format, relative to the configuration file."""
    tls_key: str | None = None
    """Private key in PEM format, relative to the configuration file."""
    page: bool = True
    """Serve the web page at `/`."""
    scale_out: bool = True
    """Serve the render routes and the token-in, token-out routes."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """The whole of `pagemill.yaml`."""

    models: Annotated[dict[str, ModelConfig], Meta(min_length=1)]
    """Served models by name, such as `qwen2.5-vl` or `org/name`: 1 to 128 printable characters."""
    nats: NatsConfig = NatsConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    blobs: BlobsConfig = BlobsConfig()
    renderer: RendererConfig = RendererConfig()
    encoder: EncoderConfig = EncoderConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    engine: EngineConfig = EngineConfig()
    generator: GeneratorConfig = GeneratorConfig()
    agent: AgentConfig = AgentConfig()
    gateway: GatewayConfig = GatewayConfig()
    metrics: MetricsConfig = MetricsConfig()
    scale: ScaleConfig = ScaleConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least severe log events that are written."""
    log_file: str | None = None
    """File to which `pagemill up` appends the log of all its workers, relative to the configuration
    file, or `stderr`. By default `pagemill.log` beside `nats.store_dir`."""
    start_silence_s: Seconds = 120.0
    """`pagemill up` gives up its start when none of the workers that are not ready has reported
    progress, computed or read from a disk for this long."""
