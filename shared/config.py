"""One `pagemill.yaml`, decoded into frozen Structs; every field can be set from the environment.

`PAGEMILL_ENGINE__BLOCK_SIZE=32` sets `engine.block_size`; a double underscore descends one level.
This module reads neither files nor the environment: `parse` is given the text and the mapping.
"""

from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from typing import Annotated, Any, Literal, TypeVar

import msgspec
import yaml
from msgspec import Meta, Struct

from shared.errors import ConfigError
from shared.protocol.sampling import SamplingParams
from shared.protocol.subjects import MAX_NAME_LEN, is_name

ENV_PREFIX = "PAGEMILL_"

T = TypeVar("T")
Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]


class NatsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    url: str | None = None
    """Of a running server, or of several of one cluster with commas between; without one
    `pagemill up` starts its own."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 4222
    """Of the embedded server, on the loopback address; 0 takes a free one."""
    store_dir: str = "data/nats"
    connect_timeout_s: Seconds = 10.0
    replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    """Of every stream; 3 in a cluster of three."""
    unchecked: bool = False
    """Start even if the server does not tell that it keeps what it has acknowledged."""


class ModelConfig(Struct, frozen=True, forbid_unknown_fields=True):
    path: str
    """A folder in Hugging Face format; relative to the configuration file."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] = "float32"
    """In float64 no answer depends on the other requests of its batch."""
    max_model_len: Positive | None = None
    """In tokens, prompt and answer together; by default what the model's own config says."""
    max_images: Annotated[int, Meta(ge=0)] = 8
    """Per request."""
    tower: Literal["engine", "encoder"] = "engine"
    """Who makes embeddings of pictures: the engine itself, or encoders (`pagemill worker encoder`),
    so that the engine holds the language model alone."""
    local_tokens: Annotated[int, Meta(ge=0)] = 0
    """Pictures of at most so many tokens stay with the engine all the same, which then needs the
    tower too."""
    share_embeddings: bool = False
    """Engines that have the tower leave embeddings for one another, and look before they make any;
    see `embeddings`."""
    sampling_defaults: dict[str, Any] = {}
    tool_parser: Literal["hermes", "llama3_json", "mistral"] | None = None
    """In which form the model writes its calls of tools; by default what its chat template says."""
    hash_model_id: str | None = None
    """The name of the model in the hashes of pictures that are rendered for other servers, which
    must have been started with it; by default `path`."""
    adapters: dict[str, str] = {}
    """LoRA adapters that a request may name: folders in peft's format, relative to the
    configuration file."""


class DeliveryConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """How long anything may take, how often it may be tried, and how much may wait."""

    default_timeout_s: Seconds = 600.0
    """From acceptance to the end, for a request that does not say."""
    max_timeout_s: Seconds = 3000.0
    """The most that a request may ask for; less than `token_log_age_s`."""
    ack_wait_s: Seconds = 10.0
    """A worker that shows no progress for so long loses what it has in hand."""
    max_deliver: Positive = 5
    """Attempts of one stage that fail, or end without a word, before it is given up."""
    max_deaths: Positive = 2
    """Workers of one stage that may die with a request in hand before it is taken for poison."""
    retry_delay_s: Seconds = 0.5
    max_queued: Positive = 10_000
    """Requests that are accepted and have not ended; beyond it new ones are refused."""
    max_request_mib: Positive = 1024
    """All accepted requests together, with their pictures; the next is refused."""
    max_stage_mib: Positive = 2048
    """All handed-over work together; beyond it stages wait with handing over."""
    max_token_log_mib: Positive = 2048
    """All token logs together; beyond it the oldest go first."""
    max_dead_mib: Positive = 512
    max_job_mib: Positive = 128
    """What gateways note of requests, all together; beyond it the oldest go first."""
    max_media_mib: Positive = 1024
    """Fetched and pinned pictures together; beyond it the oldest go first."""
    token_log_age_s: Seconds = 3600.0
    token_log_storage: Literal["file", "memory"] = "file"
    """Logs in memory are faster and lost with the broker: what was in flight begins anew, and may
    be seen twice."""
    drain_s: Seconds = 20.0


class BlobsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Large payloads, which travel beside the messages."""

    inline_kib: Positive = 64
    """Tensors up to this size together travel in the message itself."""
    arena_mib: Positive = 512
    """What a worker keeps for others, and as much again to receive into."""
    listen: str | None = None
    """Address on which other machines may have them; without one they go over the broker."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """0 takes a free one."""
    advertise: str | None = None
    """Name or address of this machine for the others; by default `listen`."""


class RendererConfig(Struct, frozen=True, forbid_unknown_fields=True):
    max_image_bytes: Positive = 32 * 2**20
    max_image_pixels: Positive = 33_554_432
    max_image_side: Positive = 16_384
    media_hosts: list[str] = []
    """Hosts from which pictures may be fetched by URL, `*` for any part of a name; none by default.
    Addresses that are not on the internet are refused even so."""
    media_networks: list[str] = []
    """Networks of one's own from which they may be fetched all the same, such as `10.1.0.0/16`."""
    fetch_timeout_s: Seconds = 5.0
    url_cache_mib: Positive = 64
    """Of fetched files, kept by URL."""
    concurrency: Positive = 8
    threads: Positive = 2


class SpeculativeConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Drafts of the next tokens, several of which the model checks in one step. Answers are the
    same, and come sooner where they repeat their prompt or themselves."""

    num_tokens: Annotated[int, Meta(ge=0)] = 0
    """The most drafts of a sequence in a step; 0 for none, 8 where answers quote."""
    min_ngram: Positive = 2
    """So many tokens at least must have stood somewhere before, for what followed them there to be
    the draft."""
    max_ngram: Positive = 4
    """The occurrence of the most tokens counts, up to this many."""
    max_step_tokens: Positive = 12
    """Drafts fill a step up to so many tokens of all sequences together, and one that has as many
    already has none. On a CPU a dozen cost little more than one, for all of them the weights are
    read once; beyond it each costs its full time. A GPU has room for more."""


class EngineConfig(Struct, frozen=True, forbid_unknown_fields=True):
    device: str = "cpu"
    threads: Annotated[int, Meta(ge=0)] = 0
    """Of torch; 0 leaves torch's own choice."""
    native: bool = True
    """On a CPU with AVX-512, C++ kernels for the models that they know; the first start compiles
    them. Without, torch does it."""
    block_size: Annotated[int, Meta(ge=1, le=256)] | None = None
    """In tokens; by default 8 on a CPU and 16 on a GPU."""
    num_blocks: Positive | None = None
    """KV blocks in the pool; by default what fits into `kv_cache_mib`."""
    kv_cache_mib: Positive = 256
    prefix_caching: bool = True
    """Keep the blocks of what has been computed until they are needed, for prompts of the same
    tenant that begin alike."""
    kv_events: bool = False
    """Tell on `pm.kv.<engine>` which blocks can be found, for those who route requests by it; with
    the token ids that are in them, so whoever may read it can read prompts."""
    embedding_cache_mib: Annotated[int, Meta(ge=0)] = 64
    """Of pictures' embeddings, for those that come again in another prompt; 0 keeps none."""
    max_num_seqs: Positive = 64
    max_appends_per_s: Positive = 200
    """To token logs, all requests together, and 25 to that of each. A first token and the end go at
    once; those between are gathered, so that several share a record and the log costs the model
    little."""
    step_timeout_s: Seconds = 120.0
    """A step that takes longer is taken to hang for ever, and ends the process."""
    max_num_batched_tokens: Positive = 2048
    speculative: SpeculativeConfig = SpeculativeConfig()


class EncoderConfig(Struct, frozen=True, forbid_unknown_fields=True):
    device: str = "cpu"
    threads: Annotated[int, Meta(ge=0)] = 0
    """Of torch; 0 leaves torch's own choice."""
    max_batch_tokens: Positive = 4096
    """Embeddings made at once, of several requests' pictures; a larger picture goes alone."""
    max_tasks: Positive = 32
    """In hand at one time."""
    step_timeout_s: Seconds = 120.0
    """A batch that takes longer is taken to hang for ever, and ends the process."""


class EmbeddingsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Where encoders leave embeddings for engines."""

    storage: Literal["memory", "directory"] = "memory"
    """In the encoder's memory, had by the roads of `blobs`; or as safetensors files."""
    path: str | None = None
    """Of the directory, which all workers share; relative to the configuration file."""
    ttl_s: Seconds = 600.0
    max_mib: Positive = 4096
    """Of a model's files in the directory; in memory `blobs.arena_mib` is the limit."""


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Over HTTP, for Prometheus; over the broker they can be had always (`pagemill metrics`)."""

    listen: str | None = None
    """Address on which every worker serves its own; without one, none does."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """The first worker's; each further one of this machine takes the next that is free. 0 takes any
    free one. Heartbeats tell which."""


class ApiKey(Struct, frozen=True, forbid_unknown_fields=True):
    """Who may use the gateway. `pagemill key` makes one, and the lines for it."""

    name: str
    """For logs and metrics; not secret."""
    sha256: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """Of the key, which itself is kept nowhere."""
    tenant: str | None = None
    """Nothing cached or stored for one tenant is found for another; by default the key's name."""
    max_requests_per_minute: Positive | None = None
    max_concurrent: Positive | None = None


class GatewayConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The HTTP door."""

    listen: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8000
    """0 takes a free one, which the log and the heartbeat tell."""
    api_keys: list[ApiKey] = []
    """Without any, everybody who can connect may use it."""
    allow_anonymous: bool = False
    """Listen elsewhere than on the loopback address without keys."""
    max_connections: Positive = 1024
    """At one time; further ones are refused."""
    max_body_mib: Positive = 64
    max_header_kib: Positive = 32
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 60.0
    """For the whole of a body to arrive."""
    send_timeout_s: Seconds = 60.0
    """For a client to take something of what waits to be sent."""
    max_answer_mib: Positive = 256
    """Log probabilities of an answer that is not streamed; four of the largest may be under way."""
    cors_origins: list[str] = []
    """Web pages of other origins that may use it, such as `https://chat.example`."""
    tls_cert: str | None = None
    """A file in PEM format, with the chain; relative to the configuration file."""
    tls_key: str | None = None
    page: bool = True
    """Serve the web page at `/`."""
    scale_out: bool = True
    """Serve render, derender and token-in, token-out."""


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    models: Annotated[dict[str, ModelConfig], Meta(min_length=1)]
    nats: NatsConfig = NatsConfig()
    delivery: DeliveryConfig = DeliveryConfig()
    blobs: BlobsConfig = BlobsConfig()
    renderer: RendererConfig = RendererConfig()
    encoder: EncoderConfig = EncoderConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    engine: EngineConfig = EngineConfig()
    gateway: GatewayConfig = GatewayConfig()
    metrics: MetricsConfig = MetricsConfig()
    log_level: Literal["debug", "info", "warning", "error"] = "info"


def parse(text: str, env: Mapping[str, str], source: str) -> Config:
    """Decode `text` (YAML) with overrides from `env`.

    Raises ConfigError, which names `source` or the variable, the key and the expected type.
    """
    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ConfigError(f"{source}: not valid YAML: {error}", field=source) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{source}: expected a mapping at the top level", field=source)
    origins = _apply_env(tree, env)
    # Models first, one by one: a path through a mapping does not tell its keys.
    models = tree.get("models")
    if isinstance(models, dict):
        for name, model in models.items():
            _convert(model, ModelConfig, f"models.{name}", origins, source)
    config = _convert(tree, Config, "", origins, source)
    _check_models(config, source)
    if config.embeddings.storage == "directory" and config.embeddings.path is None:
        raise ConfigError(
            f"{source}: embeddings.path: storage 'directory' needs one", field="embeddings.path"
        )
    _check_ngrams(config.engine.speculative, source)
    _check_times(config.delivery, source)
    _check_networks(config.renderer, source)
    _check_gateway(config.gateway, source)
    return config


def _convert(tree: Any, kind: type[T], prefix: str, origins: Mapping[str, str], source: str) -> T:
    try:
        return msgspec.convert(tree, kind)
    except msgspec.ValidationError as error:
        what, path = split_path(str(error))
        key = f"{prefix}.{path}".strip(".")
        raise ConfigError(
            f"{origins.get(key, source)}: {key or 'top level'}: {what}", field=key
        ) from error


def split_path(validation_error: str) -> tuple[str, str]:
    """msgspec's "what - at `$.a.b`" as ("what", "a.b"); what is said of a key, of its object."""
    what, _, path = validation_error.partition(" - at `")
    path = path.removeprefix("key` in `")
    return what, path.removesuffix("`").removeprefix("$").removeprefix(".")


def _apply_env(tree: dict[str, Any], env: Mapping[str, str]) -> dict[str, str]:
    """Write overrides into `tree`; returns key → name of the variable that set it."""
    origins = {}
    for name, value in sorted(env.items()):
        if not name.startswith(ENV_PREFIX):
            continue
        keys = name.removeprefix(ENV_PREFIX).lower().split("__")
        node = tree
        for key in keys[:-1]:
            child = node.setdefault(key, {})
            if not isinstance(child, dict):
                raise ConfigError(f"{name}: {key} is not a section", field=key)
            node = child
        try:
            node[keys[-1]] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ConfigError(f"{name}: not a valid value: {value!r}", field=name) from error
        origins[".".join(keys)] = name
    return origins


def _check_times(delivery: DeliveryConfig, source: str) -> None:
    """A log must outlive its request: without it nobody could tell that the request has ended."""
    for name, value, limit_name, limit in (
        ("default_timeout_s", delivery.default_timeout_s, "max_timeout_s", delivery.max_timeout_s),
        ("max_timeout_s", delivery.max_timeout_s, "token_log_age_s", delivery.token_log_age_s),
    ):
        if value > limit:
            raise ConfigError(
                f"{source}: delivery.{name}: {value:g} is more than {limit_name}, {limit:g}",
                field=f"delivery.{name}",
            )


def _check_ngrams(speculative: SpeculativeConfig, source: str) -> None:
    if speculative.min_ngram > speculative.max_ngram:
        raise ConfigError(
            f"{source}: engine.speculative.min_ngram: {speculative.min_ngram} is more than"
            f" max_ngram, {speculative.max_ngram}",
            field="engine.speculative.min_ngram",
        )


def _check_networks(renderer: RendererConfig, source: str) -> None:
    for text in renderer.media_networks:
        try:
            ip_network(text)
        except ValueError as error:
            raise ConfigError(
                f"{source}: renderer.media_networks: {error}", field="renderer.media_networks"
            ) from error


def _check_gateway(gateway: GatewayConfig, source: str) -> None:
    def wrong(key: str, what: str) -> ConfigError:
        return ConfigError(f"{source}: gateway.{key}: {what}", field=f"gateway.{key}")

    if not (gateway.api_keys or gateway.allow_anonymous or _is_loopback(gateway.listen)):
        raise wrong(
            "api_keys",
            f"there are none, and {gateway.listen} can be reached from elsewhere: make one with"
            " `pagemill key`, or set gateway.allow_anonymous",
        )
    if (gateway.tls_cert is None) != (gateway.tls_key is None):
        raise wrong("tls_key", "tls_cert and tls_key belong together")
    if len({key.sha256 for key in gateway.api_keys}) < len(gateway.api_keys):
        raise wrong("api_keys", "a key is there twice")
    for key in gateway.api_keys:
        for name in (key.name, key.name if key.tenant is None else key.tenant):
            if not is_name(name):
                raise wrong(
                    "api_keys",
                    f"{name!r} must be 1 to {MAX_NAME_LEN} letters, digits, '-' or '_'",
                )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_models(config: Config, source: str) -> None:
    for name, model in config.models.items():
        if not is_name(name):
            raise ConfigError(
                f"{source}: models: {name!r} must be 1 to {MAX_NAME_LEN} letters, digits, '-' or"
                " '_', for it is part of a subject",
                field="models",
            )
        for adapter in model.adapters:
            if not is_name(adapter):
                raise ConfigError(
                    f"{source}: models.{name}.adapters: {adapter!r} must be 1 to {MAX_NAME_LEN}"
                    " letters, digits, '-' or '_'",
                    field=f"models.{name}.adapters",
                )
        defaults = f"models.{name}.sampling_defaults"
        _convert(model.sampling_defaults, SamplingParams, defaults, {}, source)
