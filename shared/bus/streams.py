"""What the broker must have: its settings, and the streams in it."""

import json
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import APIError, ServiceUnavailableError

from shared.bus.connection import ANSWER_TIMEOUT_S, next_of
from shared.config import DeliveryConfig, NatsConfig
from shared.errors import ConfigError, Unavailable
from shared.protocol import subjects

# A request published again within this window is recognised by its id.
DUPLICATE_WINDOW_S = 120.0
# A picture that was stored longer ago is stored again by the next request that needs it, so that it
# outlives that one too.
MEDIA_REUSE_S = 600.0
# Taken in hand again and again, a request leaves this many records at most.
MAX_ATTEMPT_RECORDS = 64

MIN_SERVER_VERSION = (2, 14, 3)
MIN_MAX_PAYLOAD = 2**20
MIB = 2**20

# Longer than an election, in which nobody's heartbeat is stored.
HEARTBEAT_TTL_S = 15.0

# Servers of a cluster answer one after another; this long after the last there is no other.
NEXT_ANSWER_S = 0.25

_SETTINGS_SERVICE = "$SYS.REQ.SERVER.PING.JSZ"

# Server error codes (nats-server's errors.json).
_STREAM_EXISTS = 10058
_INSUFFICIENT_RESOURCES = (10028, 10047)


def durable_streams(delivery: DeliveryConfig, replicas: int) -> list[api.StreamConfig]:
    """Streams on disk, which outlive the broker's process."""
    token_log = api.StreamConfig(
        name=subjects.TOKENS_STREAM,
        subjects=[subjects.APPEND_FILTER],
        subject_transform=api.SubjectTransform(
            src=subjects.APPEND_FILTER, dest=subjects.TOKENS_TARGET
        ),
        republish=api.RePublish(src=subjects.TOKENS_FILTER, dest=subjects.TOKENS_TARGET),
        storage=api.StorageType(delivery.token_log_storage),
        max_age=delivery.token_log_age_s,
        max_bytes=delivery.max_token_log_mib * MIB,
        allow_direct=True,
        num_replicas=replicas,
    )
    return [
        _work_queue(
            subjects.REQUESTS_STREAM,
            subjects.REQUESTS_FILTER,
            replicas,
            max_msgs=delivery.max_queued,
            max_bytes=delivery.max_request_mib * MIB,
        ),
        _work_queue(
            subjects.STAGES_STREAM,
            subjects.STAGES_FILTER,
            replicas,
            max_bytes=delivery.max_stage_mib * MIB,
            # By then every request has ended, also of a model that nobody serves any more.
            max_age=delivery.max_timeout_s,
            # The same piece of work is there once, however often it is handed over.
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            allow_direct=True,
        ),
        _work_queue(
            subjects.CANCELS_STREAM,
            subjects.CANCELS_FILTER,
            replicas,
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_msgs=2 * delivery.max_queued,
            max_age=delivery.max_timeout_s,
        ),
        token_log,
        api.StreamConfig(
            name=subjects.MEDIA_STREAM,
            subjects=[subjects.MEDIA_FILTER, subjects.PINS_FILTER, subjects.ITEMS_FILTER],
            max_age=delivery.max_timeout_s + MEDIA_REUSE_S,
            max_bytes=delivery.max_media_mib * MIB,
            # What is stored again takes the place of the old, and its age begins anew.
            max_msgs_per_subject=1,
            allow_direct=True,
            num_replicas=replicas,
        ),
        api.StreamConfig(
            name=subjects.JOBS_STREAM,
            subjects=[subjects.JOBS_FILTER],
            # What a gateway knows of a request is of use as long as its log is there.
            max_age=delivery.token_log_age_s,
            max_bytes=delivery.max_job_mib * MIB,
            max_msgs_per_subject=1,
            allow_direct=True,
            num_replicas=replicas,
        ),
        api.StreamConfig(
            name=subjects.DEAD_STREAM,
            subjects=[subjects.DEAD_FILTER],
            max_bytes=delivery.max_dead_mib * MIB,
            allow_direct=True,
            num_replicas=replicas,
        ),
    ]


def volatile_streams(delivery: DeliveryConfig, replicas: int) -> list[api.StreamConfig]:
    """Streams that tell what is going on now; a request's fate does not hang on them.

    A broker that runs alone keeps them in memory, and forgets them and their definitions at its
    end. A replica in memory would have to fetch everything anew after its restart, and was seen not
    to catch up under load, so a cluster keeps them on disk.
    """
    storage = api.StorageType.MEMORY if replicas == 1 else api.StorageType.FILE
    return [
        api.StreamConfig(
            name=subjects.ATTEMPTS_STREAM,
            subjects=[subjects.ATTEMPTS_FILTER],
            storage=storage,
            max_age=delivery.token_log_age_s,
            max_bytes=128 * MIB,
            max_msgs_per_subject=MAX_ATTEMPT_RECORDS,
            allow_direct=True,
            num_replicas=replicas,
        ),
        # Where embeddings are. Whoever forgets that has them made, or found, once more.
        api.StreamConfig(
            name=subjects.EMBEDDINGS_STREAM,
            subjects=[subjects.EMBEDDINGS_FILTER],
            storage=storage,
            max_age=delivery.max_timeout_s,
            max_bytes=128 * MIB,
            max_msgs_per_subject=1,
            allow_direct=True,
            num_replicas=replicas,
        ),
        api.StreamConfig(
            name=subjects.KV_STREAM,
            subjects=[subjects.KV_FILTER],
            storage=storage,
            max_age=delivery.token_log_age_s,
            max_bytes=64 * MIB,
            max_msgs_per_subject=subjects.MAX_KV_BATCHES,
            allow_direct=True,
            num_replicas=replicas,
        ),
        # A key-value bucket in all but the way it is made: it shares the fate of its neighbour.
        api.StreamConfig(
            name=subjects.WORKERS_STREAM,
            subjects=[subjects.HEARTBEATS_FILTER],
            storage=storage,
            max_age=HEARTBEAT_TTL_S,
            max_bytes=32 * MIB,
            max_msgs_per_subject=1,
            allow_direct=True,
            allow_rollup_hdrs=True,
            num_replicas=replicas,
        ),
    ]


def _work_queue(name: str, subject: str, replicas: int, **limits: Any) -> api.StreamConfig:
    return api.StreamConfig(
        name=name,
        subjects=[subject],
        retention=api.RetentionPolicy.WORK_QUEUE,
        discard=api.DiscardPolicy.NEW,
        duplicate_window=DUPLICATE_WINDOW_S,
        num_replicas=replicas,
        **limits,
    )


async def ensure(nc: NatsClient, configs: list[api.StreamConfig]) -> None:
    """Create streams, or change them to `configs`; idempotent: any role may be the first to start.

    Raises ConfigError when a stream cannot become what it must be.
    """
    js = nc.jetstream(timeout=ANSWER_TIMEOUT_S)
    for config in configs:
        try:
            await js.add_stream(config)
        except APIError as error:
            if error.err_code in _INSUFFICIENT_RESOURCES:
                raise ConfigError(
                    f"nats-server: no room for stream {config.name} of {config.max_bytes} bytes:"
                    f" {error.description}; raise max_file_store or lower the limits of delivery",
                    field="delivery",
                ) from error
            if error.err_code != _STREAM_EXISTS:
                raise Unavailable(f"stream {config.name}: {error.description}") from error
            try:
                await js.update_stream(config)
            except APIError as refused:
                if isinstance(refused, ServiceUnavailableError):
                    raise Unavailable(f"stream {config.name}: {refused.description}") from refused
                raise ConfigError(
                    f"stream {config.name} exists at this server with other settings, which"
                    f" cannot be changed: {refused.description}"
                ) from refused


async def check_server(nc: NatsClient, config: NatsConfig) -> None:
    """Raises ConfigError for a server under which the promises would not hold, naming what lacks.

    An acknowledged publish must be on the disk, and only the server itself knows whether it is.
    """
    version = nc.connected_server_version
    if (version.major, version.minor, version.patch) < MIN_SERVER_VERSION:
        wanted = ".".join(map(str, MIN_SERVER_VERSION))
        raise ConfigError(f"nats-server {version} is too old: {wanted} is needed", field="nats.url")
    if nc.max_payload < MIN_MAX_PAYLOAD:
        raise ConfigError(
            f"nats-server: max_payload is {nc.max_payload}; at least {MIN_MAX_PAYLOAD} is needed",
            field="nats.url",
        )
    try:
        await nc.jetstream(timeout=ANSWER_TIMEOUT_S).account_info()
    except APIError as error:
        raise ConfigError(
            f"nats-server: JetStream is not enabled for this account: {error.description}",
            field="nats.url",
        ) from error
    if not config.unchecked:
        _check_settings(await _settings(nc), config.replicas)


def _check_settings(servers: list[dict[str, Any]], replicas: int) -> None:
    if not servers:
        raise ConfigError(
            "nats-server does not tell how it keeps its streams: export"
            f" {_SETTINGS_SERVICE} to this account as compose/nats.conf does, or set"
            " nats.unchecked: true",
            field="nats.url",
        )
    for server in servers:
        name = server["server"]["name"]
        settings = server.get("data", {}).get("config")
        if settings is None:
            # A member of the cluster that keeps no streams.
            continue
        if not settings.get("sync_always"):
            raise ConfigError(
                f"nats-server {name}: jetstream.sync_interval must be 'always': what it has"
                " acknowledged would be lost with its machine",
                field="nats.url",
            )
    # One of them may be down just now.
    storing = sum("config" in server.get("data", {}) for server in servers)
    if storing <= replicas // 2:
        raise ConfigError(
            f"nats.replicas is {replicas}, but {storing} servers keep streams",
            field="nats.replicas",
        )


async def _settings(nc: NatsClient) -> list[dict[str, Any]]:
    """What each server of the cluster says of its JetStream."""
    inbox = nc.new_inbox()
    subscription = await nc.subscribe(inbox)
    found: list[dict[str, Any]] = []
    try:
        await nc.publish(_SETTINGS_SERVICE, json.dumps({"config": True}).encode(), reply=inbox)
        timeout_s = ANSWER_TIMEOUT_S
        while True:
            msg = await next_of(subscription, timeout_s)
            if msg.headers and msg.headers.get("Status"):
                break
            found.append(json.loads(msg.data))
            timeout_s = NEXT_ANSWER_S
    except (TimeoutError, NatsError):
        pass
    finally:
        await subscription.unsubscribe()
    return found
