"""Configurations of Pagemill's streams in the broker."""

import asyncio
from collections.abc import Sequence
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError

from shared.bus.connection import REPLY_TIMEOUT_S
from shared.config.schema import AgentConfig, BatchConfig, DeliveryConfig, NatsConfig
from shared.errors import ConfigError, Unavailable
from shared.protocol import subjects

# The server recognises a message that is published again within this window, by its id.
DUPLICATE_WINDOW_S = 120.0
# Gateways publish to these streams for all tenants. A stream compares the message ids of all
# publishers, so one tenant's id would make another tenant's message a duplicate. The server gives
# each stream a window, except one that has sources. No message matches the filter of this source.
# The subjects of these streams contain the request id, and each subject has at most one message.
_SOURCE_OF_NOTHING = api.StreamSource(
    name=subjects.AUDIT_STREAM, filter_subject=subjects.audit("none")
)
# A request that uses an older stored image stores it again, so that the image outlives the request.
MEDIA_REUSE_S = 600.0
# Limit on the attempt records of one request.
MAX_ATTEMPT_RECORDS = 64

# A cancellation has no content. Without a limit, its publisher could store some.
MAX_CANCEL_BYTES = 4096

MIB = 2**20

# Longer than an election, because no heartbeat is stored during one.
HEARTBEAT_TTL_S = 15.0

# Time in which the server has created a stream, or has refused to.
CREATING_S = 0.5

# Server error codes (nats-server's errors.json).
_STREAM_EXISTS = 10058
_INSUFFICIENT_RESOURCES = (10028, 10047)


def durable_streams(
    delivery: DeliveryConfig, agent: AgentConfig, batch: BatchConfig, replicas: int
) -> list[api.StreamConfig]:
    """Return the configurations of the streams on disk, which survive the broker's process."""
    configs = (*_work_queues(delivery), *_logs(delivery), _steps(agent), _batches(batch))
    return [config.evolve(num_replicas=replicas) for config in configs]


def streams_of_tenant(
    tenant: str, nats: NatsConfig, delivery: DeliveryConfig
) -> list[api.StreamConfig]:
    """Return the configurations of the queues for what a tenant's clients publish with its key."""
    (requests, of_requests), (cancels, of_cancels) = subjects.queues_of_tenant(tenant).items()
    configs = (
        _requests(requests, [of_requests], nats.tenant_queued, nats.tenant_request_mib),
        _cancels(cancels, [of_cancels], nats.tenant_queued, delivery),
    )
    return [config.evolve(num_replicas=nats.replicas) for config in configs]


def _work_queues(delivery: DeliveryConfig) -> list[api.StreamConfig]:
    return [
        _requests(
            subjects.REQUESTS_STREAM,
            subjects.REQUESTS_SUBJECTS,
            delivery.max_queued,
            delivery.max_request_mib,
        ),
        _work_queue(
            subjects.RESPONSES_STREAM, [subjects.RESPONSES_FILTER], max_msgs=delivery.max_queued
        ),
        # A message is stored once, even if a gateway publishes it again.
        _work_queue(
            subjects.BATCHJOBS_STREAM,
            [subjects.BATCHJOBS_FILTER],
            max_msgs_per_subject=1,
            discard_new_per_subject=True,
            max_msgs=delivery.max_queued,
        ),
        _cancels(subjects.CANCELS_STREAM, subjects.CANCELS_SUBJECTS, delivery.max_queued, delivery),
    ]


def _requests(name: str, filters: Sequence[str], max_queued: int, max_mib: int) -> api.StreamConfig:
    return _work_queue(
        name,
        filters,
        max_msgs_per_subject=1,
        discard_new_per_subject=True,
        max_msgs=max_queued,
        max_bytes=max_mib * MIB,
        sources=[_SOURCE_OF_NOTHING],
    )


def _cancels(
    name: str, filters: Sequence[str], max_queued: int, delivery: DeliveryConfig
) -> api.StreamConfig:
    return _work_queue(
        name,
        filters,
        max_msgs_per_subject=1,
        discard_new_per_subject=True,
        max_msgs=2 * max_queued,
        max_msg_size=MAX_CANCEL_BYTES,
        max_age=delivery.max_timeout_s,
        sources=[_SOURCE_OF_NOTHING],
    )


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
            # The server does not allow later changes of these settings.
            deny_delete=True,
            deny_purge=True,
        ),
        # A key-value bucket on disk, so that orders of operators survive the broker's process.
        _stream(
            subjects.SCALE_STREAM,
            [subjects.SCALE_FILTER],
            max_bytes=MIB,
            max_msgs_per_subject=1,
            allow_rollup_hdrs=True,
        ),
    ]


def _steps(agent: AgentConfig) -> api.StreamConfig:
    """Return the configuration of the stream of responses, which refuses messages when full."""
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
        # Steps of a response with `store: false` expire early.
        allow_msg_ttl=True,
    )


def _batches(batch: BatchConfig) -> api.StreamConfig:
    """Return the configuration of the stream of batches, which refuses messages when full."""
    return _stream(
        subjects.BATCHES_STREAM,
        [subjects.BATCH_FILTER],
        subject_transform=api.SubjectTransform(
            src=subjects.BATCH_FILTER, dest=subjects.BATCHES_FILTER
        ),
        republish=api.RePublish(src=subjects.BATCHES_FILTER, dest=subjects.BATCHES_FILTER),
        discard=api.DiscardPolicy.NEW,
        max_age=batch.ttl_s,
        max_bytes=batch.store_mib * MIB,
        # A batch and an input file may expire early.
        allow_msg_ttl=True,
        # An input file that is uploaded again replaces the stored one.
        allow_rollup_hdrs=True,
    )


def volatile_streams(
    delivery: DeliveryConfig, replicas: int, *, is_alone: bool = True
) -> list[api.StreamConfig]:
    """Return the configurations of the streams of current state, which can be created again.

    A single broker (`is_alone`) holds them in memory. When it ends, they are lost together with all
    connections. In a cluster they are on disk: a server may restart while connections to other
    servers stay, and a replica in memory would have to fetch all data, and may never catch up under
    load.
    """
    is_alone = is_alone and replicas == 1
    storage = api.StorageType.MEMORY if is_alone else api.StorageType.FILE
    configs = (
        # Tasks can be published again from the requests, which are on disk until they have ended.
        _work_queue(
            subjects.STAGES_STREAM,
            [subjects.STAGES_FILTER],
            max_bytes=delivery.max_stage_mib * MIB,
            # After this time every request has ended, also for a model without workers.
            max_age=delivery.max_timeout_s,
            # A task is stored once, even if it is forwarded several times.
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
        # Results of item tasks, such as locations of embeddings. If they are lost, items are
        # processed again.
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


def _work_queue(name: str, filters: Sequence[str], **settings: Any) -> api.StreamConfig:
    return _with_window(
        api.StreamConfig(
            name=name,
            subjects=list(filters),
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
    """Return the configuration with its duplicate window, which is limited by the maximum age."""
    window_s = min(DUPLICATE_WINDOW_S, config.max_age or DUPLICATE_WINDOW_S)
    return config.evolve(duplicate_window=None if config.sources else window_s)


async def create_missing(
    nc: NatsClient, configs: list[api.StreamConfig], first_sequence: int
) -> list[str]:
    """Create the missing streams, and return their names. Existing streams are not changed.

    Queues, and token logs in memory, begin with `first_sequence`, so that sequences of an earlier
    stream are never used again: a late acknowledgement must not settle a message of the new stream,
    and a reader of an old log must find the records of the new one. Raises ConfigError if there is
    no space for a stream.
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
                is_of_tenant = subjects.tenant_of_queue(config.name or "")
                setting = "nats.tenant_request_mib" if is_of_tenant else "the limits of delivery"
                raise ConfigError(
                    f"nats-server: no space for stream {config.name} of {config.max_bytes} bytes:"
                    f" {error.description}; raise {limit} or lower {setting}",
                    field="nats" if is_of_tenant else "delivery",
                ) from error
            if error.err_code != _STREAM_EXISTS:
                raise Unavailable(f"stream {config.name}: {error.description}") from error
    return created


async def _is_there(js: JetStreamContext, config: api.StreamConfig) -> bool:
    """Return whether another worker has created the stream.

    While two workers create it, its space counts twice.
    """
    await asyncio.sleep(CREATING_S)
    try:
        await js.stream_info(config.name or "")
    except NotFoundError:
        return False
    return True
