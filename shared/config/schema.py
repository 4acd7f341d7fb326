"""Schema of `pagemill.yaml`, as Structs; `shared.config.parsing` decodes and checks the file."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field

from shared.native.choices import KernelSetting
from shared.protocol.chunks import ChunkSpec
from shared.protocol.images import ImageSize
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, Modality
from shared.protocol.pipeline import EdgeMode, OutputSpec
from shared.protocol.steps import ToolFilter
from shared.scaling.pools import Count, PoolSettings

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(gt=0, le=1000)]
Name = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,64}$")]
TenantName = Annotated[str, Meta(pattern="^[A-Za-z0-9_-]{1,128}$")]
Graph = Literal["qwen3-omni", "qwen2.5-omni", "none"]
"""A talker and a vocoder, which load their parts of the model's folder; see `stage.graphs`."""
Right = Literal["requests", "metrics"]

# Each is a consumer of the broker in each lane, and two pulls a second of each engine.
MAX_SLOTS = 64
# Workers of one machine share a configuration, and listen on a port each.
METRICS_PORTS = 64


class InputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An input of a stage: an edge of the model's pipeline."""

    source: str = field(name="from")
    """The stage that the input comes from, or `request`."""
    function: str
    """Name of the edge function that makes the stage's input from the source's result."""
    mode: EdgeMode = "task"
    """`task`: the source hands its result over. `stream`: the stage follows the source's output.
    `fan_out`: the source publishes a task for each item. `detour`: the source may hand its result
    to this stage first, which hands it over the source's task edge."""
    gathered_by: str | None = None
    """The stage that waits for the results of a fan-out input; by default its source."""


class StageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a model's pipeline. A field that is not set keeps the value that the stage has
    in the default pipeline."""

    enabled: bool = True
    """Whether the stage is part of the pipeline."""
    role: str | None = None
    """The role whose workers serve the stage; by default the role of the stage's name."""
    path: str | None = None
    """Folder of the model part that the stage runs, relative to the configuration file; by default
    the model's own folder."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling parameters of this stage that requests do not set."""
    replicas: Positive = 1
    """Workers that `pagemill up` starts for the stage."""
    max_wait_s: Annotated[float, Meta(gt=0)] = 300.0
    """Requests for the stage's output are refused while a task has waited for a worker for longer
    than this, in seconds. The stage that writes the text has no such limit."""
    inputs: dict[str, InputConfig] | None = None
    """By what they carry, such as `tokens` or `image`."""
    output: OutputSpec | None = None
    """The output that the stage writes."""
    chunks: ChunkSpec | None = None
    """How the stage cuts the codes that it follows, for a stage with the input `codes`."""
    voices: list[Name] = []
    """Names of the voices of a stage that speaks; the first one is the default. The model has a
    token `<|voice_NAME|>` for each."""
    frames_per_character: Annotated[float, Meta(gt=0)] | None = None
    """For a stage that speaks a whole text: how many codec frames a character of it has on average.
    By this, an output of sound that is `timed` tells how much of the text has been spoken."""
    sizes: list[ImageSize] = []
    """Sizes of image, such as `96x96`, of a stage with an output of kind `image`; the first one is
    the default."""


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


class RendererConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on media files and on fetching them."""

    max_image_bytes: Positive = 32 * 2**20
    """Limit on the size of one image file."""
    max_image_pixels: Positive = 33_554_432
    """Limit on the pixels of one image."""
    max_image_side: Positive = 16_384
    """Limit on the width and the height of one image, in pixels."""
    max_video_bytes: Positive = 64 * 2**20
    """Limit on the size of one video file."""
    max_video_frames: Positive = 36_000
    """Limit on the frames in one video file, most of which are not decoded."""
    max_video_pixels: Positive = 8_847_360
    """Limit on the pixels of one frame of a video; by default those of 4096 x 2160."""
    max_video_seconds: Seconds = 3600.0
    """Limit on the duration of one video."""
    max_audio_bytes: Positive = 25 * 2**20
    """Limit on the size of one sound file."""
    max_audio_seconds: Seconds = 600.0
    """Limit on the duration of one sound."""
    media_hosts: list[str] = []
    """Hosts from which media may be fetched by URL; `*` matches any part of a name. None by
    default. Addresses outside the public internet are refused even so."""
    media_networks: list[str] = []
    """Private networks that are exempt from that refusal, such as `10.1.0.0/16`."""
    fetch_timeout_s: Seconds = 5.0
    """Time from the resolution of the name to the last byte of a fetched file."""
    url_cache_mib: Positive = 64
    """Size of the cache of fetched files by URL: that of images, and as much for videos and for
    sounds."""
    concurrency: Positive = 8
    """Limit on tasks in flight in one renderer."""
    threads: Positive = 2
    """Number of threads that decode and process images."""
    decoders: Positive = 2
    """Number of videos and sounds that are decoded at one time, each in a process of its own."""
    decoder_cpu_s: Positive = 30
    """Limit on the processor time that decoding one file may take, in whole seconds."""
    decoder_memory_mib: Annotated[int, Meta(ge=512)] = 1536
    """Limit on the address space of a process that decodes a file. 0.3 GiB of it are libraries."""

    @property
    def max_bytes(self) -> Mapping[Modality, int]:
        """Limit on the size of a file of each modality."""
        return {
            IMAGE: self.max_image_bytes,
            VIDEO: self.max_video_bytes,
            AUDIO: self.max_audio_bytes,
        }


class EncoderConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The encoder: device and batches."""

    device: str = "cpu"
    """`cpu`, or `cuda` for an NVIDIA GPU."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads; 0 leaves it to torch."""
    kernels: KernelSetting = "measured"
    """What computes on a CPU, see `engine.kernels`."""
    max_batch_tokens: Positive = 4096
    """Limit on the embeddings of one batch, which may hold items of several requests. A larger
    item gets a batch of its own."""
    max_tasks: Positive = 32
    """Limit on tasks in flight."""
    step_timeout_s: Seconds = 120.0
    """A batch that takes longer counts as hung, and the process ends."""


class EmbeddingsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Storage in which encoders leave embeddings for engines."""

    storage: Literal["memory", "directory"] = "memory"
    """The encoder's memory, read through the transports of `blobs`; or a directory of safetensors
    files."""
    path: str | None = None
    """Directory that all workers share, relative to the configuration file."""
    ttl_s: Seconds = 600.0
    """Time for which embeddings are stored."""
    max_mib: Positive = 4096
    """Limit on the files of one model in the directory. In memory the limit is
    `blobs.arena_mib`."""


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


class GeneratorConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The generator: batches and limits."""

    max_batch: Positive = 1
    """Limit on the chunks of one batch, which are of different requests. A table's vocoder takes as
    long for each chunk of a batch as for one alone, so the first ones would only come later."""
    max_images: Positive = 8
    """Limit on the images of one batch, each of which may be at another step. With guidance, an
    image takes two rows of the batch."""
    checkpoint_s: Annotated[float, Meta(ge=0)] = 5.0
    """An image is stored after so much time of computing, so that another worker goes on there; 0
    stores it after each step."""
    result_ttl_s: Annotated[float, Meta(ge=0)] = 600.0
    """Time for which the images of a request with a seed answer equal requests of the same tenant,
    which are not painted again; 0 for none. Equal requests at the same time are painted once."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads of a stage that paints; 0 leaves it to torch."""
    max_tasks: Positive = 64
    """Limit on tasks in flight, most of which wait for the stage before."""
    step_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """A batch that takes longer counts as hung, and the process ends."""


class McpServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An MCP server that requests name by its label. Its tokens are never on the bus."""

    url: str
    """URL of its streamable HTTP transport, such as `https://tools.example/mcp`."""
    headers_env: dict[str, str] = {}
    """Environment variables of the agent with the values of request headers, by header name."""
    allowed_tools: ToolFilter | None = None
    """The only tools that may be used; by default all. A request may allow fewer."""
    require_approval: Literal["always", "never"] | None = None
    """`always`: no request can waive approval. `never`: calls need none unless a request wants it.
    By default the request decides, and without its decision calls need approval."""
    trust_annotations: bool = False
    """Make a call again whose outcome is unknown if the tool calls itself read-only or
    idempotent."""
    idempotency: Literal["none", "header"] = "none"
    """`header`: the server knows repeated calls by the header `Idempotency-Key`, so they are made
    again when their outcome is unknown."""


class AgentConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Responses: how long they are stored, and their limits."""

    ttl_s: Annotated[float, Meta(gt=0)] = 2_592_000.0
    """Time for which a response is stored, from its last step."""
    store_mib: Positive = 512
    """Limit on all stored responses together. Further responses are refused; none is dropped."""
    max_stored: Positive = 100_000
    """Limit on the stored responses of one tenant, also of those that are stored for an hour only
    (`store: false`). Further ones are refused."""
    max_stored_mib: Positive = 256
    """Limit on the bytes of these. Further ones are refused."""
    max_conversation_mib: Positive = 16
    """Limit on the stored responses that one response continues."""
    timeout_s: Annotated[float, Meta(gt=0)] = 86_400.0
    """Time in which a response must end. Where a client waits, an agent must begin it within
    `delivery.default_timeout_s`."""
    max_turns: Positive = 33
    """Limit on the turns of one response."""
    max_tool_calls: Annotated[int, Meta(ge=0)] = 32
    """Limit on the calls of MCP tools of one response; a request may set a lower one."""
    max_parallel_calls: Positive = 8
    """Limit on the calls of one turn that are made at the same time."""
    concurrency: Positive = 256
    """Limit on responses in flight in one agent."""
    max_deaths: Positive = 16
    """Agents that may die with a response, none of which stored a step, before it counts as poison.
    More than `delivery.max_deaths`, because all responses of an agent share its death."""
    servers: dict[Name, McpServerConfig] = {}
    """MCP servers by label."""
    mcp_hosts: list[str] = []
    """Hosts of MCP servers that a request may name by URL; `*` matches any part of a name. None by
    default. Addresses outside the public internet are refused even so."""
    mcp_networks: list[str] = []
    """Private networks that are exempt from that refusal, such as `127.0.0.0/8`; a server without
    TLS must be in one of them."""
    unknown: Literal["tell", "approve", "fail"] = "tell"
    """When nobody knows whether a call was carried out: tell the model, ask for approval to make it
    again, or end the response as failed."""
    call_timeout_s: Seconds = 60.0
    """Time for one call of a tool, or for listing the tools of a server, with all attempts at it
    and the opening of a session."""
    max_servers: Positive = 8
    """Limit on the MCP servers of one request."""
    max_output_kib: Positive = 64
    """Limit on the result of a call that the model is told. The rest is left out, with a note."""
    max_answer_mib: Positive = 4
    """Limit on one answer of an MCP server."""


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


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Prometheus endpoints over HTTP. `pagemill metrics` reads metrics from the broker without."""

    listen: str | None = None
    """Address on which every worker serves its own metrics, `/health` and `/ready`; without one, no
    worker does."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the first worker; each further worker on this machine takes the next free one. 0
    takes any free port. Heartbeats contain the port."""


class PoolConfig(PoolSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The workers of one role, or of one stage of a model, whose number the autoscaler decides."""

    role: str
    """Role of the workers; it must serve a stage of a pipeline."""
    model: str | None = None
    """Model that the workers serve; needed only when several are configured, and refused for a role
    whose workers serve all models."""
    stage: str | None = None
    """Stage that the workers serve; by default the one named like the role."""


class ScaleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Pools of workers that grow and shrink with the load. Without pools nothing is scaled, and no
    autoscaler is started."""

    pools: list[PoolConfig] = []
    """The pools; a pool's `min` takes the place of its stage's `replicas`."""
    budget: Count | None = None
    """Workers of all pools together; by default as many as the pools' `max` allow."""
    actuator: Literal["supervisor", "kubernetes"] = "supervisor"
    """`supervisor`: `pagemill up`, or a worker of the role `pool`, starts and drains the workers.
    `kubernetes`: autoscalers, as pods, set the sizes of the Deployments that `pagemill manifests`
    has written."""


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
