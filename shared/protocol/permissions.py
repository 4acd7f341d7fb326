"""Who may publish and subscribe to which subjects: the lists by which the broker decides.

Each role of workers has an identity of its own, and so have operators, whose commands read and
repair everything. All of these share one account. A tenant's clients have an account that is named
after the tenant: the broker maps their subjects to those of this tenant alone. `pagemill keys`
writes all this as configuration of a nats-server.

Only the broker itself publishes below `pm.tokens` and `pm.steps`, from what a stream has stored. So
a live record cannot be forged.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from shared.protocol import subjects

OPERATOR = "operator"
"""Identity of commands, and of the supervisor of `pagemill up`."""
ACCOUNT = "PAGEMILL"
SERVER_SETTINGS = "$SYS.REQ.SERVER.PING.JSZ"
"""Service of the system account that tells whether acknowledged messages are synced."""

# The broker answers this to every identity, with its clock.
_USER_INFO = "$SYS.REQ.USER.INFO"
_LOGS = (subjects.TOKENS_FILTER, subjects.STEPS_FILTER)

# Nobody changes what has been recorded, nor records anything in the name of another.
_AUDIT_CHANGES = tuple(
    f"$JS.API.STREAM.{change}.{subjects.AUDIT_STREAM}"
    for change in ("DELETE", "PURGE", "MSG.DELETE", "UPDATE")
)
_GATEWAY = "gateway"

# The streams that may be on disk, except for the audit log, which nobody may purge.
_PROBED_STREAMS = (
    subjects.REQUESTS_STREAM, subjects.RESPONSES_STREAM, subjects.CANCELS_STREAM,
    subjects.STAGES_STREAM, subjects.ATTEMPTS_STREAM, subjects.RESULTS_STREAM,
    subjects.TOKENS_STREAM, subjects.STEPS_STREAM, subjects.MEDIA_STREAM,
    subjects.JOBS_STREAM, subjects.DEAD_STREAM, subjects.SCALE_STREAM,
    subjects.KV_STREAM, subjects.WORKERS_STREAM,
)  # fmt: skip

# Who may create streams. Only the operator may change them, by `pagemill migrate`.
_CREATORS = ("coordinator", OPERATOR)


@dataclass(frozen=True, slots=True)
class Permissions:
    """What one identity may do; subjects may have wildcards."""

    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    never_publish: tuple[str, ...] = ()
    """Subjects that are refused although `publish` has them."""

    def with_(self, publish: Iterable[str] = (), subscribe: Iterable[str] = ()) -> "Permissions":
        return Permissions((*self.publish, *publish), (*self.subscribe, *subscribe))


@dataclass(frozen=True, slots=True)
class Door:
    """A subject of a tenant's account, and the subject of the other account that it stands for."""

    own: str
    mapped: str
    """With the token of the tenant, which is the name of its account, in place of `{}`."""
    is_stream: bool = False
    """Whether messages come from the other account, and do not go there."""

    @property
    def exported(self) -> str:
        """The mapped subject of every tenant."""
        return self.mapped.format("*")

    @property
    def tenant_position(self) -> int:
        """Position of the tenant's token, counted from 1."""
        return self.mapped.split(".").index("{}") + 1


_DIRECT_GET = f"$JS.API.DIRECT.GET.{subjects.TOKENS_STREAM}"

DOORS = (
    Door("pm.request.*", "pm.request.{}.*"),
    Door("pm.cancel.*", "pm.cancel.{}.*"),
    Door("pm.tokens.>", "pm.tokens.{}.>", is_stream=True),
    # The last record of a log, which says how a request has ended.
    Door(f"{_DIRECT_GET}.pm.tokens.>", f"{_DIRECT_GET}.pm.tokens.{{}}.>"),
    *(Door(f"pm.{call}.*", f"pm.{call}.{{}}.*") for call in subjects.RENDERER_CALLS),
)


def inbox_of(identity: str) -> str:
    """Prefix of the subjects on which an identity receives replies."""
    return f"_INBOX.{identity}"


def may_create_streams(identity: str) -> bool:
    """Whether an identity creates the streams; the others wait for them."""
    return identity in _CREATORS


def permissions_of_tenant() -> Permissions:
    """What clients of a tenant may do within their account."""
    return Permissions(
        (_USER_INFO, *(door.own for door in DOORS if not door.is_stream)),
        ("_INBOX.>", *(door.own for door in DOORS if door.is_stream)),
    )


def permissions_of(identity: str) -> Permissions:
    """What the operator, or a worker of a role, may do.

    A role that is not named here is one that serves stages, and may do no more than these need.
    """
    if identity == OPERATOR:
        never = (*_LOGS, *_AUDIT_CHANGES, subjects.audit(_GATEWAY))
        return Permissions((">",), (">",), never_publish=never)
    base = _worker(identity)
    match identity:
        case "coordinator":
            return _stage_worker(base).with_(
                [
                    *_creates_streams(),
                    *_consumes(subjects.REQUESTS_STREAM, subjects.CANCELS_STREAM),
                    # The probe of a stream is a purge of a subject that no message has.
                    *_purges(*_PROBED_STREAMS),
                    # All requests are to be delivered again when their tasks are lost.
                    f"$JS.API.CONSUMER.RESET.{subjects.REQUESTS_STREAM}.*",
                    f"$JS.API.CONSUMER.LIST.{subjects.STAGES_STREAM}",
                    # What each tenant has stored is measured by consumers that are removed again.
                    *_measures(subjects.TOKENS_STREAM, subjects.MEDIA_STREAM),
                    *_measures(subjects.JOBS_STREAM, subjects.DEAD_STREAM),
                ]
            )
        case "gateway":
            return _gateway(base)
        case "agent":
            return _agent(base)
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
            # One token cannot be matched in part: a report is what else this bucket has.
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


def _worker(identity: str) -> Permissions:
    """What every worker does: it reports, answers questions, and reads the other workers' reports.

    Replies go to inboxes whose names nobody can guess, and which only their owners may subscribe.
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
    """What workers of stages do besides: take tasks, write logs, hand over, and settle requests."""
    requests, results = subjects.REQUESTS_STREAM, subjects.RESULTS_STREAM
    logs, attempts = subjects.TOKENS_STREAM, subjects.ATTEMPTS_STREAM
    return base.with_(
        [
            *_consumes(subjects.STAGES_STREAM),
            *_reads(subjects.STAGES_STREAM, logs, attempts, results, subjects.MEDIA_STREAM),
            *_purges(logs, attempts),
            *_deletes(requests, results, subjects.STAGES_STREAM),
            f"$JS.API.STREAM.MSG.GET.{requests}",
            # The last worker of a request acknowledges it in place of the coordinator.
            f"$JS.ACK.{requests}.>",
            subjects.STAGES_FILTER, subjects.APPEND_FILTER, subjects.ATTEMPTS_FILTER,
            subjects.RESULTS_FILTER, subjects.DEAD_FILTER, subjects.MEDIA_FILTER,
            subjects.ENDED_FILTER, subjects.blob("*"),
        ],
        [
            *_LOGS[:1], subjects.ENDED_FILTER, subjects.RESULTS_FILTER, subjects.blob("*"),
        ],
    )  # fmt: skip


def _gateway(base: Permissions) -> Permissions:
    logs, steps, media = subjects.TOKENS_STREAM, subjects.STEPS_STREAM, subjects.MEDIA_STREAM
    stages, requests = subjects.STAGES_STREAM, subjects.REQUESTS_STREAM
    return base.with_(
        [
            *_asks(),
            subjects.STEP_FILTER, subjects.RESPONSES_FILTER, subjects.audit(_GATEWAY),
            subjects.JOBS_FILTER, subjects.MEDIA_FILTER, subjects.METRICS,
            *_reads(logs, steps, media, stages, subjects.JOBS_STREAM, subjects.ATTEMPTS_STREAM),
            *_reads(subjects.SCALE_STREAM, subjects.DEAD_STREAM),
            *_purges(logs, steps, media),
            *(f"$JS.API.CONSUMER.LIST.{stream}" for stream in (stages, requests)),
            *(f"$JS.API.CONSUMER.INFO.{stream}.*" for stream in (stages, requests)),
            f"$JS.API.CONSUMER.INFO.{subjects.RESPONSES_STREAM}.*",
            # Responses and media of tenants are measured by consumers that are removed again.
            *_measures(steps, media),
        ],
        _LOGS,
    )  # fmt: skip


def _agent(base: Permissions) -> Permissions:
    return base.with_(
        [
            *_asks(),
            subjects.STEP_FILTER,
            subjects.DEAD_FILTER,
            *_consumes(subjects.RESPONSES_STREAM),
            *_reads(subjects.TOKENS_STREAM, subjects.STEPS_STREAM, subjects.MEDIA_STREAM),
        ],
        _LOGS,
    )


def _asks() -> list[str]:
    """Publish requests and cancellations of every tenant, and ask renderers."""
    calls = [f"pm.{call}.*" for call in subjects.RENDERER_CALLS]
    return [subjects.TRUSTED_REQUESTS_FILTER, subjects.TRUSTED_CANCELS_FILTER, *calls]


def _reads(*streams: str) -> list[str]:
    return [f"$JS.API.DIRECT.GET.{stream}" for stream in streams]


def _measures(*streams: str) -> list[str]:
    """Create consumers that read headers, pull from them, and remove them."""
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


def _consumes(*streams: str) -> list[str]:
    """Create the consumers of queues, pull from them, and settle what they deliver."""
    return [
        subject
        for stream in streams
        for subject in (
            f"$JS.API.CONSUMER.INFO.{stream}.*",
            f"$JS.API.CONSUMER.LIST.{stream}",
            f"$JS.API.CONSUMER.DURABLE.CREATE.{stream}.*",
            f"$JS.API.CONSUMER.MSG.NEXT.{stream}.*",
            f"$JS.ACK.{stream}.>",
        )
    ]


def _creates_streams() -> list[str]:
    return ["$JS.API.STREAM.CREATE.*"]
