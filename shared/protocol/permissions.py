"""Permissions of identities to publish and subscribe, which the broker enforces.

Each role of workers has a separate identity. Operators have one more, whose commands can read and
repair everything. All of them share one account. The clients of a tenant have an account with the
tenant's name, and the broker maps their subjects to the subjects of this tenant. `pagemill keys`
writes the permissions as configuration of a nats-server.

Only the broker publishes below `pm.tokens`, `pm.steps` and `pm.batches`, when a stream has stored a
message. So a live record cannot be forged.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.protocol import subjects

OPERATOR = "operator"
"""Identity of commands, and of the supervisor of `pagemill up`."""
METRICS = "metrics"
"""Identity of `pagemill metrics --listen`, which reads figures and nothing of requests."""
ACCOUNT = "PAGEMILL"
SERVER_SETTINGS = "$SYS.REQ.SERVER.PING.JSZ"
"""Service of the system account that reports whether acknowledged messages are synced."""
SERVER_LIMITS = "$SYS.REQ.SERVER.PING.VARZ"
"""Service of the system account that reports the server's limits, for coordinators."""
SERVER_ACCOUNTS = "$SYS.REQ.SERVER.PING.ACCOUNTZ"
"""Service of the system account that lists the accounts of tenants, for coordinators."""

# The broker answers this to every identity, with its clock.
_USER_INFO = "$SYS.REQ.USER.INFO"
_LOGS = (subjects.TOKENS_FILTER, subjects.STEPS_FILTER)
_REPUBLISHED = (*_LOGS, subjects.BATCHES_FILTER)

# No identity may change the audit log, or write to it in the name of another identity.
_AUDIT_CHANGES = tuple(
    f"$JS.API.STREAM.{change}.{subjects.AUDIT_STREAM}"
    for change in ("DELETE", "PURGE", "MSG.DELETE", "UPDATE")
)
_GATEWAY = "gateway"
_NAMES = "$JS.API.STREAM.NAMES"

# The streams other than the queues of requests. A subject cannot match part of a token, so the
# permissions for `REQUESTS_<tenant>` include all streams, with exceptions for these.
_OTHER_STREAMS = (
    subjects.RESPONSES_STREAM, subjects.CANCELS_STREAM, subjects.STAGES_STREAM,
    subjects.ATTEMPTS_STREAM, subjects.RESULTS_STREAM, subjects.TOKENS_STREAM,
    subjects.STEPS_STREAM, subjects.MEDIA_STREAM, subjects.JOBS_STREAM, subjects.DEAD_STREAM,
    subjects.SCALE_STREAM, subjects.KV_STREAM, subjects.WORKERS_STREAM, subjects.AUDIT_STREAM,
    subjects.BATCHJOBS_STREAM, subjects.BATCHES_STREAM,
)  # fmt: skip

# The subjects to begin, cancel and read batches.
_BATCHES = (
    subjects.BATCH_FILTER,
    subjects.BATCHJOBS_FILTER,
    f"$JS.API.DIRECT.GET.{subjects.BATCHES_STREAM}",
)

# Identities that may create streams. Only the operator may change them, with `pagemill migrate`.
_CREATORS = ("coordinator", OPERATOR)


@dataclass(frozen=True, slots=True)
class Permissions:
    """Permissions of one identity. Subjects may have wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never_publish: tuple[str, ...] = ()
    """Exceptions from `publish`, which are refused."""

    def with_(self, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> "Permissions":
        allowed = (*self.publish, *publish), (*self.subscribe, *subscribe)
        return Permissions(*allowed, self.never_publish)


@dataclass(frozen=True, slots=True)
class TenantSubject:
    """Subject of a tenant's account that is mapped to a subject of the workers' account."""

    own: str
    mapped: str
    """Subject of the workers' account, with `{}` in place of the token of the tenant, which is the
    name of its account."""
    is_stream: bool = False
    """Whether messages come from the workers' account, instead of going to it."""

    @property
    def exported(self) -> str:
        """Mapped subject with a wildcard for the tenant."""
        return self.mapped.format("*")

    @property
    def tenant_position(self) -> int:
        """Position of the tenant's token, counted from 1."""
        return self.mapped.split(".").index("{}") + 1


_DIRECT_GET = f"$JS.API.DIRECT.GET.{subjects.TOKENS_STREAM}"

TENANT_SUBJECTS = (
    TenantSubject("pm.request.*.*", f"pm.request.{{}}.{subjects.WITH_KEY}.*.*"),
    TenantSubject("pm.cancel.*", f"pm.cancel.{{}}.{subjects.WITH_KEY}.*"),
    TenantSubject("pm.tokens.>", "pm.tokens.{}.>", is_stream=True),
    TenantSubject("pm.batch.*", f"pm.request.{{}}.{subjects.WITH_KEY}.{subjects.BATCH_ORDER}.*"),
    TenantSubject(
        "pm.batch.*.cancel", f"pm.request.{{}}.{subjects.WITH_KEY}.{subjects.BATCH_CANCEL}.*"
    ),
    TenantSubject("pm.batches.*", "pm.batches.{}.*.log", is_stream=True),
    # For the last record of a log, which contains the end of a request.
    TenantSubject(f"{_DIRECT_GET}.pm.tokens.>", f"{_DIRECT_GET}.pm.tokens.{{}}.>"),
    *(
        TenantSubject(f"pm.{call}.*", f"pm.{call}.{{}}.*")
        for call in (*subjects.RENDERER_CALLS, *subjects.READING_CALLS)
    ),
)


def inbox_of(identity: str) -> str:
    """Return the prefix of the subjects on which an identity receives replies."""
    return f"_INBOX.{identity}"


def may_create_streams(identity: str) -> bool:
    """Return whether an identity creates the streams. The others wait for them."""
    return identity in _CREATORS


def permissions_of_tenant() -> Permissions:
    """Return the permissions of a tenant's clients within their account."""
    return Permissions(
        (_USER_INFO, *(subject.own for subject in TENANT_SUBJECTS if not subject.is_stream)),
        ("_INBOX.>", *(subject.own for subject in TENANT_SUBJECTS if subject.is_stream)),
    )


def permissions_of(identity: str) -> Permissions:
    """Return the permissions of the operator, or of the workers of a role.

    All roles that are not listed here serve stages, and have the permissions of a stage's worker.
    """
    if identity == OPERATOR:
        never = (*_REPUBLISHED, *_AUDIT_CHANGES, subjects.audit(_GATEWAY))
        return Permissions((">",), (">",), never_publish=never)
    if identity == METRICS:
        return _metrics()
    base = _worker(identity)
    roles = {"coordinator": _coordinator, _GATEWAY: _gateway, "batcher": _batcher, "agent": _agent}
    if identity in roles:
        return roles[identity](base)
    match identity:
        case "autoscaler":
            return base.with_(
                [
                    subjects.SCALE_FILTER,
                    *_reads(subjects.STAGES_STREAM, subjects.SCALE_STREAM),
                    f"$JS.API.CONSUMER.LIST.{subjects.STAGES_STREAM}",
                ],
                [subjects.REQUESTS_FILTER, subjects.SCALE_FILTER],
            )
        case "pool":
            # Subjects cannot match part of a token, so this includes the plan next to the reports.
            writes = [subjects.SCALE_FILTER, *_reads(subjects.SCALE_STREAM)]
            pool = base.with_(writes, [subjects.SCALE_PLAN])
            return replace(pool, never_publish=(subjects.SCALE_PLAN, subjects.SCALE_ORDERS))
        case "renderer":
            calls = [f"pm.{call}.>" for call in subjects.RENDERER_CALLS]
            return _stage_worker(base).with_([subjects.PINS_FILTER, subjects.ITEMS_FILTER], calls)
        case "engine" | "prefill":
            return _stage_worker(base).with_([subjects.KV_FILTER])
        case _:
            return _stage_worker(base)


def _metrics() -> Permissions:
    """Return the permissions to ask workers for metrics, and the broker for the sizes of queues."""
    return Permissions(
        (
            _USER_INFO, SERVER_SETTINGS, "$JS.API.INFO", "$JS.API.STREAM.INFO.*", _NAMES,
            subjects.METRICS,
            *_reads(subjects.WORKERS_STREAM, subjects.STAGES_STREAM, subjects.SCALE_STREAM),
            f"$JS.API.CONSUMER.LIST.{subjects.STAGES_STREAM}",
            f"$JS.API.CONSUMER.INFO.*.{subjects.REQUESTS_CONSUMER}",
        ),
        (f"{inbox_of(METRICS)}.>",),
    )  # fmt: skip


def _worker(identity: str) -> Permissions:
    """Return the permissions that all workers need: to report, to reply, and to read reports.

    Replies go to inboxes with random names, and only the owner of an inbox may subscribe to it.
    """
    return Permissions(
        (
            _USER_INFO, SERVER_SETTINGS, "$JS.API.INFO", "$JS.API.STREAM.INFO.*",
            subjects.HEARTBEATS_FILTER, subjects.START_REPORTS_FILTER,
            "_INBOX.>", "_R_.>", subjects.SETTINGS,
            *_reads(subjects.WORKERS_STREAM),
        ),
        (f"{inbox_of(identity)}.>", subjects.METRICS, subjects.SETTINGS),
    )  # fmt: skip


def _stage_worker(base: Permissions) -> Permissions:
    """Add the permissions of stages: to claim tasks, write logs, forward, and settle requests."""
    stages, results = subjects.STAGES_STREAM, subjects.RESULTS_STREAM
    logs, attempts = subjects.TOKENS_STREAM, subjects.ATTEMPTS_STREAM
    stage_worker = base.with_(
        [
            f"$JS.API.CONSUMER.LIST.{stages}",
            *_consumes(stages),
            *_reads(stages, logs, attempts, results, subjects.MEDIA_STREAM),
            *_purges(logs, attempts),
            *_deletes("*"),
            _get("*"),
            # The last worker of a request acknowledges it in place of the coordinator.
            f"$JS.ACK.*.{subjects.REQUESTS_CONSUMER}.>",
            subjects.STAGES_FILTER, subjects.APPEND_FILTER, subjects.ATTEMPTS_FILTER,
            subjects.RESULTS_FILTER, subjects.DEAD_FILTER, subjects.MEDIA_FILTER,
            subjects.ENDED_FILTER, subjects.blob("*"),
        ],
        [
            *_LOGS[:1], subjects.ENDED_FILTER, subjects.RESULTS_FILTER, subjects.blob("*"),
        ],
    )  # fmt: skip
    protected = [stream for stream in _OTHER_STREAMS if stream not in (stages, results)]
    never = *_deletes(*protected), *map(_get, _OTHER_STREAMS)
    return replace(stage_worker, never_publish=never)


def _coordinator(base: Permissions) -> Permissions:
    coordinator = _stage_worker(base).with_(
        [
            SERVER_LIMITS,
            SERVER_ACCOUNTS,
            *_creates_streams(),
            _NAMES,
            *_consumes("*", subjects.REQUESTS_CONSUMER),
            *_consumes(subjects.ATTEMPTS_STREAM, subjects.TRACES_CONSUMER),
            *_consumes(subjects.BATCHES_STREAM, subjects.TRACES_CONSUMER),
            # The probe of a stream is a purge of a subject that no message has.
            *_purges("*"),
            # All requests must be delivered again when their tasks are lost.
            f"$JS.API.CONSUMER.RESET.*.{subjects.REQUESTS_CONSUMER}",
            f"$JS.API.CONSUMER.LIST.{subjects.STAGES_STREAM}",
            # The storage of tenants is measured by temporary consumers.
            *_measures(subjects.TOKENS_STREAM, subjects.MEDIA_STREAM),
            *_measures(subjects.JOBS_STREAM, subjects.DEAD_STREAM),
            *_measures(subjects.BATCHES_STREAM),
            # The status of a request may be in these streams, and a response in the last.
            *_reads(subjects.JOBS_STREAM, subjects.SCALE_STREAM, subjects.STEPS_STREAM),
            # Batches that clients begin and cancel with the key of their tenant.
            *_BATCHES,
        ],
        [subjects.reading_filter(call) for call in subjects.READING_CALLS],
    )
    never = *coordinator.never_publish, *_purges(subjects.AUDIT_STREAM)
    return replace(coordinator, never_publish=never)


def _gateway(base: Permissions) -> Permissions:
    logs, steps, media = subjects.TOKENS_STREAM, subjects.STEPS_STREAM, subjects.MEDIA_STREAM
    stages = subjects.STAGES_STREAM
    return base.with_(
        [
            *_asks(),
            subjects.STEP_FILTER, subjects.RESPONSES_FILTER, subjects.audit(_GATEWAY),
            subjects.JOBS_FILTER, subjects.MEDIA_FILTER, subjects.METRICS,
            *_reads(logs, steps, media, stages, subjects.JOBS_STREAM, subjects.ATTEMPTS_STREAM),
            *_reads(subjects.SCALE_STREAM, subjects.DEAD_STREAM),
            *_purges(logs, steps, media),
            f"$JS.API.CONSUMER.LIST.{stages}",
            f"$JS.API.CONSUMER.INFO.{stages}.*",
            # The depths of the queues of requests.
            _NAMES,
            f"$JS.API.CONSUMER.INFO.*.{subjects.REQUESTS_CONSUMER}",
            f"$JS.API.CONSUMER.INFO.{subjects.RESPONSES_STREAM}.*",
            # The responses and media of tenants are measured by temporary consumers.
            *_measures(steps, media),
            *_BATCHES, *_purges(subjects.BATCHES_STREAM),
        ],
        _REPUBLISHED,
    )  # fmt: skip


def _batcher(base: Permissions) -> Permissions:
    """Return the permissions of a gateway, and those to claim and settle batches."""
    batches = [subjects.ATTEMPTS_FILTER, subjects.DEAD_FILTER]
    queue = *_consumes(subjects.BATCHJOBS_STREAM), *_purges(subjects.BATCHJOBS_STREAM)
    batcher = _gateway(base).with_([*batches, *queue])
    return replace(batcher, never_publish=(subjects.audit(_GATEWAY),))


def _agent(base: Permissions) -> Permissions:
    return base.with_(
        [
            *_asks(),
            subjects.STEP_FILTER,
            subjects.DEAD_FILTER,
            subjects.ATTEMPTS_FILTER,
            f"$JS.API.CONSUMER.LIST.{subjects.RESPONSES_STREAM}",
            *_consumes(subjects.RESPONSES_STREAM),
            *_purges(subjects.RESPONSES_STREAM),
            *_reads(subjects.TOKENS_STREAM, subjects.STEPS_STREAM, subjects.MEDIA_STREAM),
            *_reads(subjects.ATTEMPTS_STREAM),
        ],
        _LOGS,
    )


def _asks() -> list[str]:
    """Return the subjects for requests, cancellations and calls in the name of any tenant."""
    calls = [f"pm.{call}.*" for call in (*subjects.RENDERER_CALLS, *subjects.READING_CALLS)]
    return [*subjects.REQUESTS_SUBJECTS, *subjects.CANCELS_SUBJECTS, *calls]


def _reads(*streams: str) -> list[str]:
    return [f"$JS.API.DIRECT.GET.{stream}" for stream in streams]


def _measures(*streams: str) -> list[str]:
    """Return the subjects to create, use and delete consumers that read headers."""
    return [
        subject
        for stream in streams
        for subject in (
            f"$JS.API.CONSUMER.CREATE.{stream}",
            f"$JS.API.CONSUMER.DELETE.{stream}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
        )
    ]


def _purges(*streams: str) -> list[str]:
    return [f"$JS.API.STREAM.PURGE.{stream}" for stream in streams]


def _deletes(*streams: str) -> list[str]:
    return [f"$JS.API.STREAM.MSG.DELETE.{stream}" for stream in streams]


def _get(stream: str) -> str:
    """Return the subject of reads from the leader of a stream."""
    return f"$JS.API.STREAM.MSG.GET.{stream}"


def _consumes(stream: str, consumer: str = "*") -> list[str]:
    """Return the subjects to create and use the consumers of queues, and to settle messages."""
    return [
        f"$JS.API.CONSUMER.INFO.{stream}.{consumer}",
        f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.{consumer}",
        f"$JS.API.CONSUMER.MSG.NEXT.{stream}.{consumer}",
        f"$JS.ACK.{stream}.{consumer}.>",
    ]


def _creates_streams() -> list[str]:
    return ["$JS.API.STREAM.CREATE.*"]
