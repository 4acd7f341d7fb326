"""The streams of Pagemill in the broker."""

import asyncio
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from shared.bus.connection import REPLY_TIMEOUT_S
from shared.config.schema import AgentConfig, DeliveryConfig
from shared.errors import ConfigError, Unavailable
from shared.protocol import subjects

# A message that is published again within this window is recognised by its message id.
DUPLICATE_WINDOW_S = 120.0
# Clients of all tenants publish to these streams. A stream compares the message ids of all
# publishers, so one tenant's id would make another tenant's message a duplicate. The server gives
# each stream a window, except one that has sources. No message matches the filter of this source.
# Coordinators recognise a request that was published twice.
_SOURCE_OF_NOTHING = api.StreamSource(
    name=subjects.AUDIT_STREAM, filter_subject=subjects.audit("none")
)
# The next request that needs an image stored longer ago stores it again, so that the image outlives
# that request, too.
MEDIA_REUSE_S = 600.0
# A request that is claimed many times leaves at most this many records.
MAX_ATTEMPT_RECORDS = 64

MIB = 2**20

# Longer than an election, in which no heartbeat is stored.
HEARTBEAT_TTL_S = 15.0

# Within this time the server has created a stream, or refused to.
CREATING_S = 0.5

# Server error codes (nats-server's errors.json).
_STREAM_EXISTS = 10058
_INSUFFICIENT_RESOURCES = (10028, 10047)


def durable_streams(
    delivery: DeliveryConfig, agent: AgentConfig, replicas: int
) -> list[api.StreamConfig]:
    """Return the configurations of the streams on disk, which survive the broker's process."""
    configs = (*_work_queues(delivery), *_logs(delivery), _steps(agent))
    return [config.evolve(num_replicas=replicas) for config in configs]


def _work_queues(delivery: DeliveryConfig) -> list[api.StreamConfig]:
    return [
        _work_queue(
            subjects.REQUESTS_STREAM,
            subjects.REQUESTS_FILTER,
            max_msgs=delivery.max_queued,
            max_bytes=delivery.max_request_mib * MIB,
            sources=[_SOURCE_OF_NOTHING],
        ),
        _work_queue(
            subjects.RESPONSES_STREAM, subjects.RESPONSES_FILTER, max_msgs=delivery.max_queued
        ),
        _work_queue(
            subjects.CANCELS_STREAM,
            subjects.CANCELS_FILTER,
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_msgs=2 * delivery.max_queued,
            max_age=delivery.max_timeout_s,
            sources=[_SOURCE_OF_NOTHING],
        ),
    ]


def _logs(delivery: DeliveryConfig) -> list[api.StreamConfig]:
    return [
        _stream(
            subjects.TOKENS_STREAM,
            [subjects.APPEND_FILTER],
            subject_transform=api.SubjectTransform(
                src=subjects.APPEND_FILTER, dest=subjects.TOKENS_FILTER
            ),
            republish=api.RePublish(src=subjects.TOKENS_FILTER, dest=subjects.TOKENS_FILTER),
            storage=api.StorageType(delivery.token_log_storage),
            max_age=delivery.token_log_age_s,
            max_bytes=delivery.max_token_log_mib * MIB,
        ),
        _stream(
            subjects.MEDIA_STREAM,
            [subjects.MEDIA_FILTER, subjects.PINS_FILTER, subjects.ITEMS_FILTER],
            max_age=delivery.max_timeout_s + MEDIA_REUSE_S,
            max_bytes=delivery.max_media_mib * MIB,
            # An image that is stored again replaces the old one, and its age restarts.
            max_msgs_per_subject=1,
        ),
        _stream(
            subjects.JOBS_STREAM,
            [subjects.JOBS_FILTER],
            # A gateway's record of a request is useful as long as the request's log exists.
            max_age=delivery.token_log_age_s,
            max_bytes=delivery.max_job_mib * MIB,
            max_msgs_per_subject=1,
        ),
        _stream(
            subjects.DEAD_STREAM, [subjects.DEAD_FILTER], max_bytes=delivery.max_dead_mib * MIB
        ),
        _stream(
            subjects.AUDIT_STREAM,
            [subjects.AUDIT_FILTER],
            max_age=delivery.audit_age_s,
            max_bytes=delivery.max_audit_mib * MIB,
            # The server does not let these be taken back.
            deny_delete=True,
            deny_purge=True,
        ),
        # A key-value bucket. What an operator has set outlives the broker's process.
        _stream(
            subjects.SCALE_STREAM,
            [subjects.SCALE_FILTER],
            max_bytes=MIB,
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
        ),
    ]


def _steps(agent: AgentConfig) -> api.StreamConfig:
    """Return the configuration of the store of responses, which refuses what has no room."""
    return _stream(
        subjects.STEPS_STREAM,
        [subjects.STEP_FILTER],
        subject_transform=api.SubjectTransform(
            src=subjects.STEP_FILTER, dest=subjects.STEPS_FILTER
        ),
        republish=api.RePublish(src=subjects.STEPS_FILTER, dest=subjects.STEPS_FILTER),
        discard=api.DiscardPolicy.NEW,
        max_age=agent.ttl_s,
        max_bytes=agent.store_mib * MIB,
        # Steps of a response that is not to be stored expire soon.
        allow_msg_ttl=True,
    )


def volatile_streams(
    delivery: DeliveryConfig, replicas: int, *, is_alone: bool = True
) -> list[api.StreamConfig]:
    """Return the configurations of the streams of current state, which can be made anew.

    A broker that `is_alone` holds them in memory, and loses them and their definitions when it
    ends, together with all connections. In a cluster they are on disk: a server may restart while
    the connections to others stay, and a replica in memory would have to fetch all data, and was
    seen not to catch up under load.
    """
    is_alone = is_alone and replicas == 1
    storage = api.StorageType.MEMORY if is_alone else api.StorageType.FILE
    configs = (
        # Tasks are made of the requests, which are on disk until they have ended.
        _work_queue(
            subjects.STAGES_STREAM,
            subjects.STAGES_FILTER,
            max_bytes=delivery.max_stage_mib * MIB,
            # By then every request has ended, also one for a model without workers.
            max_age=delivery.max_timeout_s,
            # A task is stored once, however often it is forwarded.
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            allow_direct=True,
        ),
        _stream(
            subjects.ATTEMPTS_STREAM,
            [subjects.ATTEMPTS_FILTER],
            max_age=delivery.token_log_age_s,
            max_bytes=128 * MIB,
            max_msgs_per_subject=MAX_ATTEMPT_RECORDS,
        ),
        # Results of item tasks, such as locations of embeddings. Without them items are processed
        # again.
        _stream(
            subjects.RESULTS_STREAM,
            [subjects.RESULTS_FILTER],
            max_age=delivery.max_timeout_s,
            max_bytes=128 * MIB,
            max_msgs_per_subject=1,
        ),
        _stream(
            subjects.KV_STREAM,
            [subjects.KV_FILTER],
            max_age=delivery.token_log_age_s,
            max_bytes=64 * MIB,
            max_msgs_per_subject=subjects.MAX_KV_BATCHES,
        ),
        # Behaves like a key-value bucket, but is created like the other volatile streams.
        _stream(
            subjects.WORKERS_STREAM,
            [subjects.HEARTBEATS_FILTER, subjects.START_REPORTS_FILTER],
            max_age=HEARTBEAT_TTL_S,
            max_bytes=32 * MIB,
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
        ),
    )
    return [config.evolve(num_replicas=replicas, storage=storage) for config in configs]


def _work_queue(name: str, subject: str, **settings: Any) -> api.StreamConfig:
    return _with_window(
        api.StreamConfig(
            name=name,
            subjects=[subject],
            retention=api.RetentionPolicy.WORK_QUEUE,
            discard=api.DiscardPolicy.NEW,
            **settings,
        )
    )


def _stream(name: str, filters: list[str], **settings: Any) -> api.StreamConfig:
    return _with_window(
        api.StreamConfig(name=name, subjects=filters, allow_direct=True, **settings)
    )


def _with_window(config: api.StreamConfig) -> api.StreamConfig:
    """Return the configuration with its duplicate window, which may not exceed the maximal age."""
    window_s = min(DUPLICATE_WINDOW_S, config.max_age or DUPLICATE_WINDOW_S)
    return config.evolve(duplicate_window=None if config.sources else window_s)


async def create_missing(
    nc: NatsClient, configs: list[api.StreamConfig], first_sequence: int
) -> list[str]:
    """Create the streams that do not exist, and return their names. Other streams stay as they are.

    Queues, and token logs in memory, begin with `first_sequence`: an acknowledgement names a
    sequence, and a late one must not settle a message of a later stream. Nor must a reader of a log
    look for its continuation after the end of a later stream. Raises ConfigError when there is no
    space for a stream.
    """
    js, created = nc.jetstream(timeout=REPLY_TIMEOUT_S), []
    for config in configs:
        try:
            await js.stream_info(config.name or "")
            continue
        except NotFoundError:
            pass
        is_log = config.name == subjects.TOKENS_STREAM and config.storage is api.StorageType.MEMORY
        if is_log or config.retention is api.RetentionPolicy.WORK_QUEUE:
            config = config.evolve(first_seq=first_sequence)
        try:
            await js.add_stream(config)
            created.append(config.name or "")
        except APIError as error:
            if error.err_code in _INSUFFICIENT_RESOURCES and not await _is_there(js, config):
                is_volatile = config.storage is api.StorageType.MEMORY
                limit = "max_memory_store" if is_volatile else "max_file_store"
                raise ConfigError(
                    f"nats-server: no space for stream {config.name} of {config.max_bytes} bytes:"
                    f" {error.description}; raise {limit} or lower the limits of delivery",
                    field="delivery",
                ) from error
            if error.err_code != _STREAM_EXISTS:
                raise Unavailable(f"stream {config.name}: {error.description}") from error
    return created


async def _is_there(js: JetStreamContext, config: api.StreamConfig) -> bool:
    """Return whether another worker has created the stream, whose space counts twice meanwhile."""
    await asyncio.sleep(CREATING_S)
    try:
        await js.stream_info(config.name or "")
    except NotFoundError:
        return False
    return True
