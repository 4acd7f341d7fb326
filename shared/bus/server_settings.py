"""Checks of the broker: settings that the delivery guarantees depend on, and limits."""

import json
from collections.abc import Mapping
from typing import Any

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import APIError

from shared.bus.connection import REPLY_TIMEOUT_S, Connection
from shared.config.schema import NatsConfig
from shared.errors import ConfigError, Unavailable
from shared.protocol.names import TENANT_MARK
from shared.protocol.permissions import SERVER_ACCOUNTS, SERVER_LIMITS, SERVER_SETTINGS

MIN_SERVER_VERSION = (2, 14, 3)
MIN_MAX_PAYLOAD = 2**20

# The servers of a cluster reply separately. When most of them have replied, further replies are
# expected within this pause.
NEXT_REPLY_TIMEOUT_S = 0.25

# Default of nats-server, which is more than many processes have descriptors.
UNSET_MAX_CONNECTIONS = 65_536
# A gateway has a subscription for each answer that it sends.
MIN_SUBSCRIPTIONS = 16_384
# Number of the largest messages that may be under way to one worker.
MIN_PENDING_MESSAGES = 16

# Server error code (nats-server's errors.json). All other errors of JetStream may be temporary: a
# server starts, or a cluster elects a leader.
_NOT_ENABLED_FOR_ACCOUNT = 10039

_log = structlog.get_logger()


async def check_server(connection: Connection, config: NatsConfig) -> None:
    """Check that the server can give the delivery guarantees.

    An acknowledged publish must be on disk, which only the server's own settings show. Raises
    ConfigError with the missing setting, and Unavailable or an error of nats-py for a temporary
    failure, such as an election.
    """
    nc = connection.nc
    connected = nc.connected_server_version
    version = connected.major, connected.minor, connected.patch
    if version < MIN_SERVER_VERSION:
        current, required = (".".join(map(str, parts)) for parts in (version, MIN_SERVER_VERSION))
        raise ConfigError(
            f"nats-server {current} is too old: {required} is required", field="nats.url"
        )
    if nc.max_payload < MIN_MAX_PAYLOAD:
        raise ConfigError(
            f"nats-server: max_payload is {nc.max_payload}; at least {MIN_MAX_PAYLOAD} is required",
            field="nats.url",
        )
    is_clustered = not connection.is_alone
    try:
        await nc.jetstream(timeout=REPLY_TIMEOUT_S).account_info()
    except APIError as error:
        # Other servers of a cluster may have JetStream, and only not answer at the moment.
        has_none = error.err_code is None and not is_clustered
        if error.err_code != _NOT_ENABLED_FOR_ACCOUNT and not has_none:
            raise
        raise ConfigError(
            "nats-server: JetStream is not enabled for this account"
            f" ({error.description or 'there is no answer'})",
            field="nats.url",
        ) from error
    if not config.unchecked:
        servers = await read_servers(connection, config.replicas)
        _check_settings(servers, config.replicas, is_clustered=is_clustered)


def _check_settings(servers: list[dict[str, Any]], replicas: int, *, is_clustered: bool) -> None:
    if not servers:
        raise ConfigError(
            "nats-server does not report its JetStream settings: export"
            f" {SERVER_SETTINGS} to this account as compose/nats.conf does, or set"
            " nats.unchecked: true",
            field="nats.url",
        )
    for server in servers:
        name = server["server"]["name"]
        settings = server.get("data", {}).get("config")
        if settings is None or server["data"].get("disabled"):
            # A member of the cluster, or a leaf node, without JetStream stores no streams.
            continue
        if not settings.get("sync_always"):
            raise ConfigError(
                f"nats-server {name}: jetstream.sync_interval must be 'always', or acknowledged"
                " messages could be lost with its machine",
                field="nats.url",
            )
    # A minority of the replicas may be down at the moment, and further servers may join.
    reports = [server.get("data", {}) for server in servers]
    storing = sum("config" in report and not report.get("disabled") for report in reports)
    if storing <= replicas // 2:
        error = Unavailable if is_clustered else ConfigError
        raise error(
            f"nats.replicas is {replicas}, but {storing} servers store streams",
            field="nats.replicas",
        )


async def read_servers(connection: Connection, replicas: int) -> list[dict[str, Any]]:
    """Return the JetStream reports of the servers of the cluster, at least of most of them.

    Empty if the broker has no such service. Raises an error of nats-py if no server answers.
    """
    query = json.dumps({"config": True}).encode()
    return await _ask_servers(connection, SERVER_SETTINGS, query, replicas)


async def check_limits(connection: Connection, config: NatsConfig) -> None:
    """Log a warning for each limit of a server that should change.

    A server without this service, or with permissions of an older version, is not checked.
    """
    try:
        servers = await _ask_servers(connection, SERVER_LIMITS, b"", config.replicas)
    except NatsError:
        return
    for server in servers:
        for setting, reason in find_unsuitable_limits(server.get("data", {})).items():
            name = server["server"]["name"]
            _log.warning("broker_limit_unsuitable", server=name, setting=setting, reason=reason)


async def read_tenants(connection: Connection, replicas: int) -> list[str]:
    """Return the tenants that have an account on any server of the cluster.

    Empty if the broker has no such service. Raises an error of nats-py if no server answers.
    """
    servers = await _ask_servers(connection, SERVER_ACCOUNTS, b"", replicas)
    accounts = {name for server in servers for name in server.get("data", {}).get("accounts", [])}
    return sorted(name[1:] for name in accounts if name.startswith(TENANT_MARK))


def find_unsuitable_limits(limits: Mapping[str, int]) -> dict[str, str]:
    """Return the settings of a server that should change, each with the reason. Pure."""
    unsuitable = {}
    if (number := limits.get("max_connections", 0)) >= UNSET_MAX_CONNECTIONS:
        unsuitable["max_connections"] = (
            f"it is {number}; set it well below the server's limit on descriptors, or its streams"
            " may store nothing until a restart"
        )
    if 0 < (number := limits.get("max_subscriptions", 0)) < MIN_SUBSCRIPTIONS:
        unsuitable["max_subscriptions"] = (
            f"it is {number}; a gateway needs one for each answer: set at least {MIN_SUBSCRIPTIONS}"
        )
    min_pending = MIN_PENDING_MESSAGES * limits.get("max_payload", 0)
    if (number := limits.get("max_pending", min_pending)) < min_pending:
        unsuitable["max_pending"] = (
            f"it is {number}; the server disconnects workers for which more waits: set at least"
            f" {min_pending}, {MIN_PENDING_MESSAGES} times max_payload"
        )
    return unsuitable


async def _ask_servers(
    connection: Connection, service: str, query: bytes, replicas: int
) -> list[dict[str, Any]]:
    """Return the replies of the servers of the cluster, at least of most of them.

    Servers of other domains, such as leaf nodes, are left out. Empty if the broker has no such
    service. Raises an error of nats-py if no server answers.
    """
    timeout_s = REPLY_TIMEOUT_S
    answers: list[dict[str, Any]] = []
    async with connection.inbox.request(service, query) as replies:
        while True:
            try:
                msg = await replies.next(timeout_s)
            except (TimeoutError, NatsError):
                if not answers:
                    raise
                return answers
            if msg.headers and msg.headers.get("Status"):
                return answers
            answer = json.loads(msg.data)
            if answer["server"].get("domain") == connection.domain:
                answers.append(answer)
            if len(answers) > replicas // 2:
                timeout_s = NEXT_REPLY_TIMEOUT_S
