"""Check of the broker's settings that the delivery guarantees depend on."""

import json
from typing import Any

from nats.aio.client import Client as NatsClient
from nats.errors import Error as NatsError
from nats.js.errors import APIError

from shared.bus.connection import REPLY_TIMEOUT_S
from shared.bus.replies import ReplyInbox
from shared.config.schema import NatsConfig
from shared.errors import ConfigError, Unavailable

MIN_SERVER_VERSION = (2, 14, 3)
MIN_MAX_PAYLOAD = 2**20

# The servers of a cluster reply separately. When most of them have replied, further replies are
# expected within this pause.
NEXT_REPLY_TIMEOUT_S = 0.25

_SETTINGS_SERVICE = "$SYS.REQ.SERVER.PING.JSZ"

# Server error code (nats-server's errors.json). All other errors of JetStream may be temporary: a
# server starts, or a cluster elects a leader.
_NOT_ENABLED_FOR_ACCOUNT = 10039


async def check_server(nc: NatsClient, inbox: ReplyInbox, config: NatsConfig) -> None:
    """Check that the server can give the delivery guarantees.

    An acknowledged publish must be on disk, which only the server's own settings show. Raises
    ConfigError with the missing setting, and Unavailable or an error of nats-py for a temporary
    failure, such as an election.
    """
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
    is_clustered = bool(nc._server_info.get("cluster"))
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
        servers = await read_servers(inbox, config.replicas)
        _check_settings(servers, config.replicas, is_clustered=is_clustered)


def _check_settings(servers: list[dict[str, Any]], replicas: int, *, is_clustered: bool) -> None:
    if not servers:
        raise ConfigError(
            "nats-server does not report its JetStream settings: export"
            f" {_SETTINGS_SERVICE} to this account as compose/nats.conf does, or set"
            " nats.unchecked: true",
            field="nats.url",
        )
    for server in servers:
        name = server["server"]["name"]
        settings = server.get("data", {}).get("config")
        if settings is None:
            # A member of the cluster without JetStream stores no streams.
            continue
        if not settings.get("sync_always"):
            raise ConfigError(
                f"nats-server {name}: jetstream.sync_interval must be 'always', or acknowledged"
                " messages could be lost with its machine",
                field="nats.url",
            )
    # A minority of the replicas may be down at the moment, and further servers may join.
    storing = sum("config" in server.get("data", {}) for server in servers)
    if storing <= replicas // 2:
        error = Unavailable if is_clustered else ConfigError
        raise error(
            f"nats.replicas is {replicas}, but {storing} servers store streams",
            field="nats.replicas",
        )


async def read_servers(inbox: ReplyInbox, replicas: int) -> list[dict[str, Any]]:
    """Return the JetStream reports of the servers of the cluster, at least of most of them.

    Empty if the broker has no such service. Raises an error of nats-py if no server answers.
    """
    query, timeout_s = json.dumps({"config": True}).encode(), REPLY_TIMEOUT_S
    settings: list[dict[str, Any]] = []
    async with inbox.request(_SETTINGS_SERVICE, query) as replies:
        while True:
            try:
                msg = await replies.next(timeout_s)
            except (TimeoutError, NatsError):
                if not settings:
                    raise
                return settings
            if msg.headers and msg.headers.get("Status"):
                return settings
            settings.append(json.loads(msg.data))
            if len(settings) > replicas // 2:
                timeout_s = NEXT_REPLY_TIMEOUT_S
