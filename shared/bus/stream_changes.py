"""Differences between a cluster's streams and the configuration, and the effects of changes."""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.js import JetStreamContext, api
from nats.js.errors import APIError, NotFoundError, ServiceUnavailableError

from shared.bus.connection import REPLY_TIMEOUT_S
from shared.errors import ConfigError, Unavailable
from shared.protocol import subjects

MISSING = "missing"
# The server removes the messages beyond a smaller limit before it answers.
CHANGE_TIMEOUT_S = 300.0
# Values of the server for omitted settings.
_DEFAULTS: dict[str, Any] = {
    "subjects": [],
    "retention": api.RetentionPolicy.LIMITS,
    "discard": api.DiscardPolicy.OLD,
    "discard_new_per_subject": False,
    "storage": api.StorageType.FILE,
    "num_replicas": 1,
    "max_msgs": -1,
    "max_bytes": -1,
    "max_msg_size": -1,
    "max_age": 0.0,
    "max_msgs_per_subject": -1,
    "duplicate_window": 0.0,
    "sources": [],
    "subject_transform": None,
    "republish": None,
    "allow_direct": False,
    "allow_rollup_hdrs": False,
    "allow_msg_ttl": False,
}
# Without these settings, messages would be lost, stored twice or never delivered. The others are
# sizes and places, or subjects, and publishers to a missing subject get an error.
ESSENTIAL = frozenset(
    {
        "retention",
        "discard",
        "discard_new_per_subject",
        "subject_transform",
        "republish",
        "allow_direct",
        "allow_rollup_hdrs",
        "allow_msg_ttl",
    }
)
_FIXED = frozenset({"storage", "retention"})
"""Settings that the server does not change on an existing stream."""


@dataclass(frozen=True, slots=True)
class Difference:
    """Setting of a stream that differs from the configuration."""

    stream: str
    setting: str
    """Empty for a stream that does not exist."""
    current: Any
    target: Any

    @property
    def is_essential(self) -> bool:
        """Whether workers cannot run with the other value."""
        return self.setting in ESSENTIAL

    @property
    def is_fixed(self) -> bool:
        """Whether only a new stream can have the setting.

        The stream of the audit log must not be changed at all, because that could shorten the log.
        """
        is_audit = self.stream == subjects.AUDIT_STREAM and bool(self.setting)
        return is_audit or self.setting in _FIXED

    @property
    def current_words(self) -> str:
        return MISSING if not self.setting else words_of(self.setting, self.current)

    @property
    def target_words(self) -> str:
        return "created" if not self.setting else words_of(self.setting, self.target)


@dataclass(frozen=True, slots=True)
class StreamChange:
    """Change that `pagemill migrate` would make because of a difference."""

    difference: Difference
    effect: str
    shrinks: bool = False
    """Whether the new limit is below the size of the stored messages."""


def differences(target: api.StreamConfig, current: api.StreamConfig) -> list[Difference]:
    """Return the settings of `current` that differ from `target`."""
    both = [(name, _value(current, name), _value(target, name)) for name in _DEFAULTS]
    stream = target.name or ""
    return [Difference(stream, name, is_, to_be) for name, is_, to_be in both if is_ != to_be]


def _value(config: api.StreamConfig, setting: str) -> Any:
    value = getattr(config, setting)
    if setting in ("republish", "subject_transform") and value is not None:
        return value.src, value.dest
    if setting == "sources":
        return [source.name for source in value or []]
    return _DEFAULTS[setting] if value is None or value == 0 else value


def words_of(setting: str, value: Any) -> str:
    """Return a value of a setting in readable form."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case list():
            return ", ".join(value) or "none"
        case (source, target):
            return f"{source} → {target}"
        case int() if setting.startswith("max_") and setting != "max_age" and value < 0:
            return "unlimited"
        case int() if setting in ("max_bytes", "max_msg_size"):
            return f"{value / 2**20:,.6g} MiB"
        case int() | float() if setting == "max_age":
            return f"{value:,.6g} s" if value else "unlimited"
        case int() | float() if setting == "duplicate_window":
            return f"{value:,.6g} s" if value else "none"
        case int():
            return f"{value:,}"
    return str(getattr(value, "value", value))


async def find_differences(nc: NatsClient, configs: Iterable[api.StreamConfig]) -> list[Difference]:
    """Return the differences between the streams of the cluster and `configs`."""
    return [
        difference
        for config in configs
        for difference in _compare(config, await _find(_manager(nc), config.name or ""))
    ]


async def find_changes(
    nc: NatsClient, configs: Iterable[api.StreamConfig], now_ms: float
) -> list[StreamChange]:
    """Return the changes that make the streams of the cluster equal to `configs`."""
    changes, js = [], _manager(nc)
    for config in configs:
        info = await _find(js, config.name or "")
        for difference in _compare(config, info):
            changes.append(await _effect_of(js, difference, info, now_ms / 1000))
    return changes


async def apply_changes(
    nc: NatsClient, configs: Iterable[api.StreamConfig], changes: Iterable[StreamChange]
) -> None:
    """Change streams that exist.

    Fixed settings are not changed. Raises ConfigError for a change that the server refuses.
    """
    js = nc.jetstream(timeout=CHANGE_TIMEOUT_S)
    by_name = {config.name: config for config in configs}
    settings: dict[str, dict[str, Any]] = {}
    for change in changes:
        difference = change.difference
        if not difference.is_fixed:
            value = getattr(by_name[difference.stream], difference.setting)
            settings.setdefault(difference.stream, {})[difference.setting] = (
                _DEFAULTS[difference.setting] if value is None else value
            )
    for stream, values in settings.items():
        try:
            current = (await js.stream_info(stream)).config
            await js.update_stream(current.evolve(**values))
        except ServiceUnavailableError as error:
            raise Unavailable(f"stream {stream}: {error.description}") from error
        except APIError as error:
            raise ConfigError(
                f"the broker refuses to change stream {stream}: {error.description}"
            ) from error


def _manager(nc: NatsClient) -> JetStreamContext:
    js: JetStreamContext = nc.jetstream(timeout=REPLY_TIMEOUT_S)
    return js


async def _find(js: JetStreamContext, stream: str) -> api.StreamInfo | None:
    try:
        return await js.stream_info(stream)
    except NotFoundError:
        return None


def _compare(target: api.StreamConfig, info: api.StreamInfo | None) -> list[Difference]:
    if info is None:
        return [Difference(target.name or "", "", None, None)]
    return differences(target, info.config)


async def _effect_of(
    js: JetStreamContext, difference: Difference, info: api.StreamInfo | None, now_s: float
) -> StreamChange:
    if info is None:
        return StreamChange(difference, "would create the stream")
    if difference.is_fixed:
        return StreamChange(difference, "none: only a new stream can have it")
    num_lost = await _count_beyond(js, difference, info, now_s)
    if num_lost <= 0:
        return StreamChange(difference, f"keeps all {info.state.messages:,} messages")
    deletes = difference.setting in ("max_age", "max_msgs_per_subject")
    if info.config.discard == api.DiscardPolicy.NEW and not deletes:
        effect = f"would refuse new messages until {num_lost:,} messages have been removed"
    else:
        effect = f"would delete {num_lost:,} messages"
    return StreamChange(difference, effect, shrinks=True)


async def _count_beyond(
    js: JetStreamContext, difference: Difference, info: api.StreamInfo, now_s: float
) -> int:
    """Return the number of stored messages beyond a new limit.

    For a limit on bytes, it is estimated from the mean size of the messages.
    """
    limit: float = difference.target if difference.setting.startswith("max_") else 0
    state, stream = info.state, difference.stream
    if limit <= 0 or not state.messages:
        return 0
    match difference.setting:
        case "max_msgs":
            return int(state.messages - limit)
        case "max_bytes":
            return math.ceil((state.bytes - limit) * state.messages / max(state.bytes, 1))
        case "max_age":
            return await _count_older(js, stream, now_s - limit, state)
    detailed = await js.stream_info(stream, subjects_filter=">")
    return sum(max(0, count - int(limit)) for count in (detailed.state.subjects or {}).values())


async def _count_older(
    js: JetStreamContext, stream: str, since_s: float, state: api.StreamState
) -> int:
    """Return the number of older messages, by bisection. Removed messages among them count too."""
    first, last = state.first_seq, state.last_seq + 1
    while first < last:
        middle = (first + last) // 2
        try:
            message = await js.get_msg(stream, middle, subject=">", next=True)
        except NotFoundError:
            last = middle
            continue
        assert message.time is not None
        assert message.seq is not None
        if message.time.timestamp() < since_s:
            first = message.seq + 1
        else:
            last = middle
    return min(first - state.first_seq, state.messages)
