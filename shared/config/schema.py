"""Schema of `pagemill.yaml`, as Structs; `shared.config.parsing` decodes and checks the file."""

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct, field
from msgspec.structs import replace

from shared.config.gpu_memory import DEFAULT, GpuMemory
from shared.helpers import patterns
from shared.native.choices import KernelSetting
from shared.protocol.chunks import ChunkSpec
from shared.protocol.images import ImageSize
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, VIDEO, FileKind
from shared.protocol.pipeline import EdgeMode, OutputSpec
from shared.protocol.steps import ToolFilter
from shared.scaling.pools import Count, PoolSettings

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Weight = Annotated[float, Meta(gt=0, le=1000)]
Name = Annotated[str, Meta(pattern=patterns.NAME)]
TenantName = Annotated[str, Meta(pattern=patterns.TENANT_NAME)]
Graph = Literal[
    "qwen3-omni",
    "qwen2.5-omni",
    "orpheus",
    "qwen-image",
    "qwen-image-edit",
    "qwen-image-edit-plus",
    "flux.1-dev",
    "flux.1-schnell",
    "stable-diffusion-3",
    "z-image",
    "pixart-sigma",
    "wan",
    "none",
]
"""Built-in stages of a model; see `stage.graphs`."""
Right = Literal["requests", "metrics"]

# Each slot is a consumer of the broker in each lane, with two pulls per second from each engine.
MAX_SLOTS = 64
# Workers on one machine share a configuration, and each of them listens on a separate port.
METRICS_PORTS = 64


class InputConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Input of a stage: an edge of the model's pipeline."""

    source: str = field(name="from")
    """Stage that the input comes from, or `request`."""
    function: str
    """Name of the edge function that turns the source's result into the stage's input."""
    mode: EdgeMode = "task"
    """`task`: the source forwards its result. `stream`: the stage follows the source's output.
    `fan_out`: the source publishes a task for each item. `detour`: the source may forward its
    result to this stage first, which forwards it over the source's task edge."""
    gathered_by: str | None = None
    """Stage that waits for the results of a fan-out input; by default its source."""


class StageConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One stage of a model's pipeline. Fields that are not set have the value of the default
    pipeline."""

    enabled: bool = True
    """Whether the stage is part of the pipeline."""
    role: str | None = None
    """Role of the workers that serve the stage; by default the role with the stage's name."""
    path: str | None = None
    """Folder with the stage's part of the model, relative to the configuration file; by default the
    model's own folder."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling parameters of this stage for requests that do not set them."""
    replicas: Positive = 1
    """Number of workers that `pagemill up` starts for the stage."""
    device: str | None = None
    """`cpu`, or `cuda` for NVIDIA GPUs; by default as in the section of the role. A stage with a
    device reads neither `devices` nor `gpu_memory` there."""
    devices: list[int | str] = []
    """GPUs for the stage's workers, see `generator.devices`."""
    gpu_memory: GpuMemory = DEFAULT
    """Memory of its GPU that a worker of the stage uses, see `generator.gpu_memory`."""
    max_wait_s: Annotated[float, Meta(gt=0)] = 300.0
    """Requests for the stage's output are refused while a task has waited for a worker for longer
    than this, in seconds. The stage that writes the text has no such limit."""
    inputs: dict[str, InputConfig] | None = None
    """Inputs of the stage, by the carried kind, such as `tokens` or `image`."""
    output: OutputSpec | None = None
    """Output that the stage writes."""
    chunks: ChunkSpec | None = None
    """Chunks into which a stage with the input `codes` cuts the codes."""
    voices: list[Name] = []
    """Names of the voices of a stage that speaks; the first one is the default. The model has a
    token `<|voice_NAME|>` for each."""
    frames_per_character: Annotated[float, Meta(gt=0)] | None = None
    """Mean number of codec frames for a character of the text, for a stage that speaks a whole
    text. A `timed` output of sound derives its position in the text from it."""
    sizes: list[ImageSize] = []
    """Sizes, such as `96x96`, of the images or videos of a stage with an output of kind `image` or
    `video`; the first one is the default."""
    input_images: Annotated[int, Meta(ge=0)] = 0
    """Limit on the images that a request gives to a stage that edits images."""


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """One served model."""

    path: str
    """Folder in Hugging Face format, relative to the configuration file."""
    description: str = ""
    """Sentence for users about what the model can do, in `/v1/models` and in `pagemill up`."""
    dtype: Literal["auto", "float64", "float32", "bfloat16", "float16"] = "auto"
    """Type of the weights. `auto` is `float32` on a CPU. On a GPU it is the type in which the
    weights were saved, and `bfloat16` for weights of more than 16 bits; `pagemill check` prints
    it. With `float64`, an answer does not depend on other requests of its batch."""
    quantization: Literal["int8"] | None = None
    """`int8` rounds the linear layers of the decoder to 8 bits while they are read, with one scale
    per output channel. All other weights keep `dtype`, which must be `bfloat16`, `float32` or
    `auto`. Without the C++ kernels, the matrix products are fast only with `bfloat16`. On a GPU it
    is refused."""
    max_model_len: Positive | None = None
    """Limit on prompt and answer together, in tokens; by default the model's own limit."""
    max_images: Annotated[int, Meta(ge=0)] = 8
    """Limit on images per request."""
    max_videos: Annotated[int, Meta(ge=0)] = 2
    """Limit on videos per request."""
    max_audios: Annotated[int, Meta(ge=0)] = 4
    """Limit on sounds per request."""
    max_frames: Positive = 768
    """Limit on the frames that are used of one video."""
    max_frames_mib: Positive = 64
    """Limit on the total size of these frames, after they have been resized."""
    tower: Literal["engine", "encoder"] = "engine"
    """The worker that computes embeddings of media: the engine, or encoders (`pagemill worker
    encoder`), so that the engine loads only the language model."""
    local_tokens: Annotated[int, Meta(ge=0)] = 0
    """With `tower: encoder`, the engine still encodes items of at most this many tokens. If it is
    not 0, the engine loads the tower as well."""
    prefill: Literal["engine", "prefill"] = "engine"
    """The worker that computes long prompts: the engine, or prefill workers (`pagemill worker
    prefill`), which send the KV blocks to the engine."""
    min_prefill_tokens: Positive = 2048
    """With `prefill: prefill`, prompts with fewer tokens are sent directly to the engine."""
    pooling: Literal["last", "mean"] | None = None
    """Pooling of hidden states into an embedding of a prompt: the state of the last token, or the
    mean over all tokens. By default as in `1_Pooling/config.json` of the folder, and without this
    file, the last token."""
    share_embeddings: bool = False
    """Whether engines with a vision tower store embeddings for one another, and read stored ones
    before they compute them; see `embeddings`."""
    sampling_defaults: dict[str, Any] = {}
    """Sampling parameters for requests that do not set them."""
    generation_config: bool = False
    """Whether the sampling parameters in the folder's `generation_config.json` are defaults, too.
    `sampling_defaults` override them. Each process that reads the configuration needs the file."""
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """Format of the model's tool calls; by default derived from the chat template."""
    hash_model_id: str | None = None
    """Name of the model in mm_hashes of media for other servers, which must be the same in all of
    them; by default `path`."""
    adapters: dict[str, str] = {}
    """LoRA adapters that requests may select: folders in peft's format, relative to the
    configuration file."""
    pools: "dict[Name, EnginePool]" = {}
    """Pools of the model's engines with different settings, such as one on GPUs and one on CPUs.
    They serve the same queues. Settings that a pool leaves out are taken from `engine`."""
    slots: Annotated[int, Meta(ge=1, le=MAX_SLOTS)] = 1
    """Number of queues of the model's engines in each lane. With more than 1, requests with the
    same beginning wait in the same queue, and one engine serves this queue before the others."""
    graph: Graph | None = None
    """Set of further built-in stages; by default derived from the model's folder."""
    stages: dict[str, StageConfig] = {}
    """Changes and additions to the model's pipeline, by name of the stage; see `pagemill check`."""

    @property
    def engine_has_tower(self) -> bool:
        """Whether engines load the tower, if the model has one."""
        return self.tower == "engine" or self.local_tokens > 0


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The broker and the connection to it."""

    url: str | None = None
    """URL of a running server, or comma-separated URLs of several servers of one cluster. By
    default `pagemill up` starts an embedded server."""
    domain: Name | None = None
    """JetStream domain of the brokers, as in their `jetstream.domain`; refused without a `url`.
    Workers and commands on leaf nodes need it, and so does `pagemill keys`, which permits its
    subjects."""
    password_file: str | None = None
    """File with the password for users in `url` without a password, relative to the configuration
    file; refused without a `url`."""
    keys: str | None = None
    """Folder of `pagemill keys`, relative to the configuration file. Workers read the key of their
    role, and commands the operator's key. By default `pagemill up` creates it in `store_dir`."""
    tenant_connections: Positive = 16
    """Limit on the connections of clients with one tenant's key, written by `pagemill keys`."""
    tenant_payload_mib: Positive = 8
    """Limit on one message from a client with a tenant's key, written by `pagemill keys`. A lower
    `max_payload` of the server applies as well."""
    tenant_queued: Positive = 5_000
    """Limit on accepted requests of clients with one tenant's key that have not ended. Further
    requests of this tenant's clients are refused."""
    tenant_request_mib: Positive = 32
    """Limit on the total size of these requests with their media. Coordinators reserve it on the
    broker's disk for each tenant with a key."""
    tls_ca: str | None = None
    """Certificates of the authorities that sign the server's certificate, in PEM format. They
    enable encryption."""
    tls_cert: str | None = None
    """Certificate with which this client authenticates, with `tls_key`."""
    tls_key: str | None = None
    """Private key of `tls_cert`."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 4222
    """Port of the embedded server on the loopback address; 0 selects a free port."""
    store_dir: str = "data/nats"
    """Directory in which the embedded server stores its streams."""
    min_free_percent: Annotated[float, Meta(ge=0, lt=100)] = 5.0
    """Part of the broker's disk that must be free. With less, new requests, files and responses are
    refused until there is more; 0 disables this limit. For a server of `url`, the disk is its
    `max_file_store`."""
    min_free_mib: Annotated[int, Meta(ge=0)] = 1024
    """Free space that the broker's disk must have, like `min_free_percent`. The larger limit
    counts; 0 disables this one."""
    connect_timeout_s: Seconds = 10.0
    """Time in which a starting worker must connect to the broker."""
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Number of replicas of every stream; 3 in a cluster of three."""
    unchecked: bool = False
    """Start even if the server does not report whether it syncs every acknowledged message."""


class DeliveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits on time, attempts and queued data."""

    default_timeout_s: Seconds = 600.0
    """Time from acceptance to the end, for requests without a timeout."""
    max_timeout_s: Seconds = 3000.0
    """Limit on the timeout of a request; must not exceed `token_log_age_s`."""
    ack_wait_s: Seconds = 10.0
    """Time after which a worker that reports no progress loses its messages in flight."""
    max_deliver: Positive = 5
    """Attempts of one stage that may fail, or end without a result, before the request fails."""
    max_deaths: Positive = 2
    """Workers of one stage that may die while they process a request, before it fails as poison."""
    retry_delay_s: Seconds = 0.5
    """Pause before a stage's second attempt. Each further pause is twice as long, up to 30 s."""
    max_queued: Positive = 10_000
    """Limit on accepted requests that have not ended. Further requests are refused."""
    max_request_mib: Positive = 1024
    """Limit on the total size of accepted requests with their media. Further requests are
    refused."""
    max_stage_mib: Positive = 2048
    """Limit on the total size of forwarded tasks, which a single broker has in memory. Beyond it,
    stages wait."""
    max_token_log_mib: Positive = 2048
    """Limit on the total size of token logs. Beyond it, the oldest are deleted."""
    max_dead_mib: Positive = 512
    """Limit on the total size of dead letters. Beyond it, the oldest are deleted."""
    max_job_mib: Positive = 128
    """Limit on the total size of the gateways' request records. Beyond it, the oldest are
    deleted."""
    max_audit_mib: Positive = 64
    """Limit on the size of the audit log. Beyond it, the oldest records are deleted."""
    audit_age_s: Seconds = 31_536_000.0
    """Time for which a record of the audit log is stored."""
    max_media_mib: Positive = 1024
    """Limit on the total size of fetched and pinned media. Beyond it, the oldest are deleted."""
    tokens_per_minute: dict[TenantName, Positive] = {}
    """Limits on the tokens of tenants, prompts included, by the tenant's name; by default none.
    Each coordinator counts the tokens of the requests that it admits."""
    tenant_weights: dict[TenantName, Weight] = {}
    """Weights of the shares of tenants, by default 1. The share of a tenant in token logs, media,
    request records and dead letters is its weight times the space that the other tenants and a
    reserve of a tenth leave free. Its share of a busy model is its weight times the mean use of all
    tenants; beyond it, its requests are served in the batch lane."""
    tenant_reads: Positive = 32
    """Limit on the reads (`pm.read`, `pm.state`, `pm.results`, `pm.file`) of one tenant that each
    coordinator has in flight. Further reads are refused."""
    token_log_age_s: Seconds = 3600.0
    """Time for which a token log is stored."""
    token_log_storage: Literal["file", "memory"] = "file"
    """Storage of token logs. Logs in memory are faster, but are lost with the broker: requests in
    flight start again, and clients may receive tokens twice."""
    drain_s: Seconds = 20.0
    """Time in which a draining worker may finish its tasks in flight, and other workers may fetch
    its payloads. It then requeues the remaining tasks."""


class BlobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Large payloads, which are transferred outside the messages."""

    inline_kib: Positive = 64
    """Limit on the total size of tensors that are part of a message. Larger tensors become
    blobs."""
    arena_mib: Positive = 512
    """Memory for the blobs that a worker serves, and the same amount for blobs that it receives."""
    listen: str | None = None
    """Address at which other machines get blobs. By default they get them through the broker."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port for `listen`; 0 selects a free port."""
    advertise: str | None = None
    """Name or address of this machine for other machines; by default `listen`, or for `0.0.0.0` and
    `::` the local address of this worker's connection to the broker."""


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
    """Limit on the frames in one video file. Most of them are not decoded."""
    max_video_pixels: Positive = 8_847_360
    """Limit on the pixels of one frame of a video; by default 4096 x 2160."""
    max_video_seconds: Seconds = 3600.0
    """Limit on the duration of one video."""
    max_audio_bytes: Positive = 25 * 2**20
    """Limit on the size of one sound file."""
    max_audio_seconds: Seconds = 600.0
    """Limit on the duration of one sound."""
    max_document_bytes: Positive = 32 * 2**20
    """Limit on the size of one PDF document. Its pages have the limits of images."""
    max_document_pages: Positive = 100
    """Limit on the pages of all documents that one request uses."""
    media_hosts: list[str] = []
    """Hosts from which media may be fetched by URL; `*` matches any part of a name. By default
    none. Addresses outside the public internet are always refused, except for `media_networks`."""
    media_networks: list[str] = []
    """Private networks from which media may be fetched, such as `10.1.0.0/16`."""
    fetch_timeout_s: Seconds = 5.0
    """Time from the resolution of the name to the last byte of a fetched file."""
    url_cache_mib: Positive = 64
    """Size of each of four caches of fetched files by URL: for images, videos, sounds and
    documents."""
    concurrency: Positive = 8
    """Limit on tasks in flight in one renderer."""
    threads: Positive = 2
    """Number of threads that decode and process images."""
    decoders: Positive = 2
    """Limit on videos, sounds and pages of documents that are decoded at one time, each in a
    separate process."""
    decoder_cpu_s: Positive = 30
    """Limit on the processor time to decode one file, or one page of a document, in whole
    seconds."""
    decoder_memory_mib: Annotated[int, Meta(ge=512)] = 1536
    """Limit on the address space of a process that decodes a file. Libraries take 0.3 GiB of it."""

    @property
    def max_bytes(self) -> Mapping[FileKind, int]:
        """Limit on the size of a file of each kind."""
        return {
            IMAGE: self.max_image_bytes,
            VIDEO: self.max_video_bytes,
            AUDIO: self.max_audio_bytes,
            DOCUMENT: self.max_document_bytes,
        }


class DeviceConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Devices that the workers of a role compute on."""

    device: str = "cpu"
    """`cpu`, or `cuda` for NVIDIA GPUs."""
    devices: list[int | str] = []
    """GPUs for the workers that `pagemill up` starts: numbers as in `nvidia-smi`, UUIDs, also of
    MIG instances, or MIG profiles such as `mig-1g.10gb`. The `replicas` of a stage are started for
    each entry, or for every `tensor_parallel` entries. By default all GPUs may be used, and the
    `replicas` are spread over them."""
    gpu_memory: GpuMemory = DEFAULT
    """Memory of its GPU that a worker uses: a share, such as 0.9, or a size, such as `20 GiB`.
    Workers share a GPU only if their parts fit into it."""


def with_devices_of(stage: StageConfig, section: DeviceConfig) -> DeviceConfig:
    """Return the section of a role with the devices of a stage, if the stage has a device."""
    if stage.device is None:
        return section
    return replace(section, device=stage.device, devices=stage.devices, gpu_memory=stage.gpu_memory)


class EncoderConfig(DeviceConfig, frozen=True, forbid_unknown_fields=True):
    """The encoder: device and batches."""

    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads; 0 for torch's default."""
    kernels: KernelSetting = "measured"
    """Kernels on a CPU, see `engine.kernels`."""
    max_batch_tokens: Positive = 4096
    """Limit on the embeddings of one batch, which may have items of several requests. A larger item
    gets a separate batch."""
    max_tasks: Positive = 32
    """Limit on tasks in flight."""
    step_timeout_s: Seconds = 120.0
    """Limit on the time of one batch. Beyond it, the batch counts as hung, and the process ends."""


class EmbeddingsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Storage for embeddings that encoders compute for engines. Texts that are encoded for images
    are always in memory."""

    storage: Literal["memory", "directory"] = "memory"
    """`memory`: the encoder's memory, read through the transports of `blobs`. `directory`: a
    directory of safetensors files."""
    path: str | None = None
    """Directory that all workers share, relative to the configuration file."""
    ttl_s: Seconds = 600.0
    """Time for which embeddings and encoded texts are stored."""
    max_mib: Positive = 4096
    """Limit on the total size of one model's files in the directory. In memory the limit is
    `blobs.arena_mib`."""


class SpeculativeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Speculative decoding: the model checks several drafted tokens in one step.

    Answers stay the same, and are faster if they repeat parts of their prompt or of themselves.
    """

    num_tokens: Annotated[int, Meta(ge=0)] = 0
    """Maximum number of drafted tokens of a sequence per step. 0 disables speculative decoding; 8
    suits answers that quote."""
    min_ngram: Positive = 2
    """Length of the shortest n-gram to look up, in tokens. The tokens after its earlier occurrence
    are the draft."""
    max_ngram: Positive = 4
    """Length of the longest n-gram to look up, in tokens. The longest match is used."""
    max_step_tokens: Positive = 12
    """Maximum number of tokens of all sequences in a step with drafts. A step that has as many
    without drafts gets none. On a CPU a dozen tokens cost little more than one, because the weights
    are read once for all of them; each further token costs its full time. A GPU has room for
    more."""


class EngineConfig(DeviceConfig, frozen=True, forbid_unknown_fields=True):
    """The engine: device, KV cache and batches."""

    tensor_parallel: Annotated[int, Meta(ge=1, le=64)] = 1
    """Number of processes (ranks) that share each model. Each has a part of every layer's weights
    and of the KV cache; on GPUs, each has a device."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads; 0 for torch's default. Ranks divide the default."""
    kernels: KernelSetting = "measured"
    """Kernels on a CPU. `measured`: the C++ kernels for supported models, and for each product and
    attention of the tower the fastest implementation on this machine; the first starts compile and
    measure them. `vector`, `tiles`: the C++ kernels with AVX-512, or with AMX if the processor has
    it. `torch`: no C++ kernels. `pagemill check --kernels` prints the measurements."""
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    """Tokens per KV block; by default 8 on a CPU and 16 on a GPU."""
    num_blocks: Positive | None = None
    """Number of KV blocks; by default as many as fit into `kv_cache_mib`."""
    kv_cache_mib: Positive | None = None
    """Size of the KV cache, in each rank; by default 256 MiB on a CPU. On a GPU, the default is the
    part of `gpu_memory` that weights and the largest step leave, as measured at the start."""
    prefix_caching: bool = True
    """Cache computed blocks until their memory is needed, for prompts of the same tenant with the
    same prefix."""
    kv_events: bool = False
    """Publish cached blocks on `pm.kv.<engine>`, for routers that route by cached prefix. The
    events include token ids, so a reader of the stream can read prompts."""
    embedding_cache_mib: Annotated[int, Meta(ge=0)] = 64
    """Size of the cache of media embeddings, for media that recur in other prompts; 0 disables
    it."""
    max_num_seqs: Positive = 64
    """Limit on sequences in one batch."""
    max_appends_per_s: Positive = 400
    """Limit on appends per second to the logs of all requests together. There are fewer, down to a
    fifth of the limit, while appends take more than two thirds of the time. Each log gets at most
    25 of them, and a log of codes or of a request in the batch lane 1. First tokens of interactive
    requests, ends, and codes that complete a chunk are appended at once. Other tokens are batched
    into common records, so that the log takes little time from the model."""
    step_timeout_s: Seconds = 120.0
    """Limit on the time of one step, and of one batch of the tower thread. Beyond it, they count as
    hung, and the process ends. Also the time after which other ranks are given up, if they neither
    compute nor read from a disk while rank 0 waits for them."""
    max_num_batched_tokens: Positive = 2048
    """Limit on the tokens of one step; longer prompts are prefilled in chunks."""
    steps_ahead: Literal[0, 1] | None = None
    """Number of steps whose forward pass is launched before the tokens of the step before are
    known; by default 1 on a GPU, which then does not wait for the engine, and 0 on a CPU. A step
    with drafts waits for the tokens, and so do talkers and models with recurrent layers. Answers
    stay the same."""
    tower_thread: bool | None = None
    """Encode images and other media in a separate thread, and on a GPU in a separate stream, while
    answers continue; by default on a GPU. On a CPU both share the cores: answers do not pause, and
    first tokens of requests with media come later. Answers stay the same."""
    tower_batch_tokens: Positive = 4096
    """Limit on the embeddings of one batch of this thread. A larger item gets a separate batch."""
    max_step_ms: Annotated[float, Meta(gt=0)] | None = None
    """Target time of a step while sequences decode. Prompts get the part that decoding leaves, by
    the measured time of a token. A shorter time makes running answers smoother and first tokens
    later. By default there is no limit."""
    min_prompt_share: Annotated[float, Meta(ge=0, le=1)] = 0.5
    """Share of `max_step_ms` that prompts always get, for any number of decoding sequences."""
    interactive_slowdown: Annotated[float, Meta(gt=1)] = 1.25
    """Limit on what requests of the batch lane cost interactive requests. With 1.25, a step with
    interactive requests takes at most 1.25 times as long as it would take without the batch lane,
    by the measured time of steps. A larger value makes the batch lane faster next to interactive
    requests."""
    speculative: SpeculativeConfig = SpeculativeConfig()


class EnginePool(EngineConfig, frozen=True, forbid_unknown_fields=True):
    """A pool of engines: all settings of `engine`, and a size."""

    replicas: Positive = 1
    """Number of engines that `pagemill up` starts, for each of the `devices` if they are named. The
    `min` of an entry of `scale.pools` replaces it."""


class GeneratorConfig(DeviceConfig, frozen=True, forbid_unknown_fields=True):
    """The generator: device, batches and limits."""

    max_batch: Positive = 1
    """Limit on the chunks of one batch, which belong to different requests. A table vocoder takes
    the same time for each chunk of a batch as for a single one, so a larger batch would only delay
    the first chunks."""
    max_images: Positive = 8
    """Limit on the images of one batch, which may be at different steps. With guidance, an image
    takes two rows of the batch."""
    checkpoint_s: Annotated[float, Meta(ge=0)] = 5.0
    """Interval of computing time after which an unfinished image is stored, so that another worker
    can continue it; 0 stores it after each step."""
    result_ttl_s: Annotated[float, Meta(ge=0)] = 600.0
    """Time for which the images of a request with a seed are reused for equal requests of the same
    tenant; 0 disables it. Equal requests at the same time are painted once."""
    threads: Annotated[int, Meta(ge=0)] = 0
    """Number of torch threads of a stage that paints; 0 for torch's default."""
    max_tasks: Positive = 64
    """Limit on tasks in flight. Most of them wait for the previous stage."""
    step_timeout_s: Annotated[float, Meta(gt=0)] = 120.0
    """Limit on the time of one batch. Beyond it, the batch counts as hung, and the process ends."""


class McpServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """MCP server that requests name by its label. Its tokens are never on the bus."""

    url: str
    """URL of its streamable HTTP transport, such as `https://tools.example/mcp`."""
    headers_env: dict[str, str] = {}
    """Environment variables of the agent with the values of request headers, by header name."""
    allowed_tools: ToolFilter | None = None
    """Tools that may be used; by default all. A request may allow fewer."""
    require_approval: Literal["always", "never"] | None = None
    """`always`: calls need approval, also if the request waives it. `never`: calls need approval
    only if the request requires it. By default the request decides, and if it does not, calls need
    approval."""
    trust_annotations: bool = False
    """Repeat calls with an unknown outcome if the tool declares itself read-only or idempotent."""
    idempotency: Literal["none", "header"] = "none"
    """`header`: the server recognizes repeated calls by the header `Idempotency-Key`, so calls with
    an unknown outcome are repeated."""


class AgentConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Responses: time of storage, and limits."""

    ttl_s: Annotated[float, Meta(gt=0)] = 2_592_000.0
    """Time for which a response is stored after its last step."""
    store_mib: Positive = 512
    """Limit on the total size of stored responses. Further responses are refused; none is deleted
    early."""
    max_stored: Positive = 100_000
    """Limit on the number of stored responses of one tenant, including responses with
    `store: false`, which are stored for an hour. Further responses are refused."""
    max_stored_mib: Positive = 256
    """Limit on the total size of one tenant's stored responses. Further responses are refused."""
    max_conversation_mib: Positive = 16
    """Limit on the total size of the stored responses that one response continues."""
    timeout_s: Annotated[float, Meta(gt=0)] = 86_400.0
    """Time in which a response must end. If a client waits for it, an agent must begin it within
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
    """Hosts of MCP servers that a request may name by URL; `*` matches any part of a name. By
    default none. Addresses outside the public internet are always refused, except for
    `mcp_networks`."""
    mcp_networks: list[str] = []
    """Private networks in which MCP servers may be, such as `127.0.0.0/8`. A server without TLS
    must be in one of them."""
    unknown: Literal["tell", "approve", "fail"] = "tell"
    """Treatment of a call with an unknown outcome: report this to the model, request approval to
    repeat the call, or end the response as failed."""
    call_timeout_s: Seconds = 60.0
    """Time for one call of a tool, or for one listing of a server's tools, including all attempts
    and the opening of a session."""
    max_servers: Positive = 8
    """Limit on the MCP servers of one request."""
    max_output_kib: Positive = 64
    """Limit on the part of a call's result that the model gets. The rest is replaced by a note."""
    max_answer_mib: Positive = 4
    """Limit on one answer of an MCP server."""


class BatchConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Batches: limits, and time of storage."""

    ttl_s: Annotated[float, Meta(ge=3600)] = 2_592_000.0
    """Time for which a batch, its input file and its results are stored."""
    store_mib: Positive = 2048
    """Limit on the total size of stored batches and their input files. Beyond it, uploads are
    refused, and batches pause until there is room; none is deleted early. A 64th of it is reserved
    for cancellations and for the ends of batches."""
    max_lines: Annotated[int, Meta(ge=1, le=1_000_000)] = 50_000
    """Limit on the lines of a batch."""
    max_file_mib: Annotated[int, Meta(ge=1, le=512)] = 200
    """Limit on the size of an input file."""
    max_line_mib: Annotated[int, Meta(ge=1, le=64)] = 8
    """Limit on the size of one line of an input file."""
    max_window_h: Positive = 168
    """Limit on the completion window of a batch, in hours."""
    max_unfinished: Positive = 100
    """Limit on the batches of one tenant that have not ended. Further batches are refused."""
    concurrency: Positive = 256
    """Limit on batches in progress in one batcher."""
    max_deaths: Positive = 16
    """Batchers that may die with a batch, none of which stored a result, before it counts as
    poison."""


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """Key of the gateway. `pagemill key` creates a key and prints its configuration."""

    name: str
    """Name in logs and metrics; not secret."""
    sha256: Annotated[str, Meta(pattern=patterns.SHA256)]
    """SHA-256 digest of the key. The key itself is not stored."""
    tenant: str | None = None
    """Tenant of the key, by default the key's name. The key can access only the cached and stored
    data of this tenant."""
    rights: tuple[Right, ...] = ("requests",)
    """Rights of the key: `requests` for every endpoint except `/metrics`, and `metrics` for that
    one, which covers all tenants."""
    max_requests_per_minute: Positive | None = None
    """Limit on counted requests of this key per minute, in each gateway; by default none."""
    max_concurrent: Positive | None = None
    """Limit on simultaneous counted requests of this key, in each gateway; by default none."""


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP gateway: address, keys, limits and optional routes."""

    listen: str = "127.0.0.1"
    """Address on which the gateway serves HTTP."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """Port of the gateway; 0 selects a free port, which the log and the heartbeat contain."""
    api_keys: list[ApiKey] = []
    """API keys. Without keys, every client that can connect may use the gateway."""
    tenant: TenantName | None = None
    """Tenant of all requests to a gateway without keys; by default none. They share their ids,
    answers and files with the clients of this tenant that use NATS."""
    allow_anonymous: bool = False
    """Permit an address other than loopback without keys."""
    hosts: list[Annotated[str, Meta(pattern=patterns.HOST)]] = []
    """Host names, without a port, that requests may contain in addition to `localhost`, loopback
    addresses and the name in `public_url`. By default all names are accepted, except by a gateway
    without keys on a loopback address: a foreign web page could reach it by a name that resolves to
    this address."""
    max_connections: Positive = 1024
    """Limit on open connections. At the limit, an idle connection closes for a new one. Connections
    without a valid key keep a quarter of the places, and a tenant among others has requests in
    progress on at most three quarters of the rest."""
    max_body_mib: Positive = 64
    """Limit on the size of one request body."""
    max_header_kib: Positive = 32
    """Limit on the size of all headers of one request."""
    unknown_fields: Literal["refuse", "ignore"] = "refuse"
    """Whether a body with an unknown field is refused, or the field has no effect: in JSON, at any
    depth, in forms, and in the bodies of a batch's lines. Refused in either case are fields that
    are known and not supported, unknown files of forms, unknown fields next to the `body` of a
    line, and unknown fields of requests over NATS."""
    header_timeout_s: Seconds = 10.0
    """Time in which the headers, or a TLS handshake, must arrive."""
    body_timeout_s: Seconds = 60.0
    """Time in which the complete body must arrive; for a file, each next part of it."""
    upload_timeout_s: Seconds = 600.0
    """Time in which a file must arrive completely."""
    send_timeout_s: Seconds = 60.0
    """Time in which the client must read some of the data that waits to be sent."""
    max_answer_mib: Positive = 256
    """Limit on the size of log probabilities or embeddings of an answer that is not streamed. Four
    answers of this size may be in progress at one time."""
    public_url: Annotated[str, Meta(pattern=patterns.HTTP_URL)] | None = None
    """Address at which clients reach the gateway, for the URLs of images; by default the Host
    header of a request."""
    cors_origins: list[str] = []
    """Origins whose web pages may call the gateway, such as `https://chat.example`."""
    tls_cert: str | None = None
    """Certificate chain in PEM format, relative to the configuration file."""
    tls_key: str | None = None
    """Private key in PEM format, relative to the configuration file."""
    page: bool = True
    """Serve the web page at `/`."""
    access_log: bool = False
    """Log a line for each HTTP request when it has ended: the event `http_request` with the
    client's address, tenant, method, path, status, seconds, bytes, tokens and id."""
    scale_out: bool = True
    """Serve the render routes and the token-in, token-out routes."""


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Prometheus endpoints over HTTP. `pagemill metrics` does not need them."""

    listen: str | None = None
    """Address on which every worker serves its own metrics, `/health` and `/ready`; by default
    workers do not serve them."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """Port of the first worker. Each further worker on this machine uses the next free port. 0
    selects any free port. Heartbeats contain the port."""


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Spans of requests, which coordinators send to a collector after the requests have ended."""

    otlp_url: Annotated[str, Meta(pattern=patterns.HTTP_URL)] | None = None
    """URL to which spans are posted over OTLP, such as `http://collector:4318/v1/traces`. It needs
    the extra `pagemill[otel]`. By default there are no spans."""
    ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the requests without a `traceparent` that get a trace. For the other requests, the
    flag of the `traceparent` decides."""


class PoolConfig(PoolSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Workers of one role, or of one stage of a model, that the autoscaler scales."""

    role: str
    """Role of the workers; it must serve a stage of a pipeline."""
    model: str | None = None
    """Model that the workers serve; needed only if several are configured, and refused for a role
    that serves all models."""
    stage: str | None = None
    """Stage that the workers serve; by default the stage with the name of the role."""
    pool: str | None = None
    """Pool in `pools` of the model, which is needed if the model has any. The pool with the higher
    `priority` grows first, and the next one when it is at its `max`."""


class ScaleConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Pools of workers that grow and shrink with the load. Without pools nothing is scaled, and no
    autoscaler is started."""

    pools: list[PoolConfig] = []
    """The pools. A pool's `min` replaces the `replicas` of its stage."""
    budget: Count | None = None
    """Limit on the workers of all pools together; by default the sum of the pools' `max`."""
    timezone: str = "UTC"
    """Time zone of the pools' schedules, such as `Europe/Berlin`."""
    actuator: Literal["supervisor", "kubernetes"] = "supervisor"
    """`supervisor`: `pagemill up`, or a worker of the role `pool`, starts and drains the workers.
    `kubernetes`: autoscalers, which run as pods, set the sizes of the chart's
    Deployments."""


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
    batch: BatchConfig = BatchConfig()
    gateway: GatewayConfig = GatewayConfig()
    metrics: MetricsConfig = MetricsConfig()
    tracing: TracingConfig = TracingConfig()
    scale: ScaleConfig = ScaleConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of log events to write."""
    log_file: str | None = None
    """File to which `pagemill up` appends the log of all its workers, relative to the configuration
    file, or `stderr`. By default `pagemill.log` next to the folder `nats.store_dir`."""
    start_silence_s: Seconds = 120.0
    """Time after which `pagemill up` gives up its start, if no worker that is not ready has
    reported progress, computed or read from a disk."""


def device_sections(config: Config) -> Iterator[tuple[str, DeviceConfig]]:
    """Yield all settings of devices with their keys."""
    for key in config.__struct_fields__:
        if isinstance(section := getattr(config, key), DeviceConfig):
            yield key, section
    for name, model in config.models.items():
        for pool, section in model.pools.items():
            yield f"models.{name}.pools.{pool}", section
        for stage, settings in model.stages.items():
            if settings.device is not None:
                yield f"models.{name}.stages.{stage}", with_devices_of(settings, DeviceConfig())
