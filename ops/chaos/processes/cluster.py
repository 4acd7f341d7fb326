"""A cluster of three nats-servers that replicate every stream, and faults of its members.

Members have numbers. Two of the three must run for a message to be stored, and a member that
returns must catch up first: `wait_current` returns when the next member may fail.
"""

import asyncio
import contextlib
import json
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.errors import Error as NatsError

from ops.chaos.processes import network
from shared.bus.embedded_server import CONFIG_DIR, EmbeddedServer, free_port
from shared.errors import Unavailable

SIZE = 3
# An election takes 4 to 9 s; streams elect their leaders after the meta group has one.
READY_TIMEOUT_S = 40.0
POLL_S = 0.1
ANSWER_TIMEOUT_S = 1.0
# Leaders send heartbeats every second.
MAX_SILENT_S = 1.6

_Down = (NatsError, OSError, TimeoutError)


class Cluster:
    """Three servers. `url` lists all of them, separated by commas, as `Bus.connect` expects."""

    def __init__(self, folder: Path, accounts_file: Path | None = None) -> None:
        """`accounts_file` is as for EmbeddedServer."""
        self.route_ports = [free_port() for _ in range(SIZE)]
        routes = ", ".join(f'"nats://127.0.0.1:{port}"' for port in self.route_ports)
        self.members = [
            EmbeddedServer(
                folder / f"n{number}",
                config_file=CONFIG_DIR / "nats-cluster.conf",
                variables={
                    "NATS_NAME": f"n{number}",
                    "NATS_CLUSTER_PORT": str(self.route_ports[number]),
                    "NATS_ROUTES": f"[{routes}]",
                },
                accounts_file=accounts_file,
            )
            for number in range(SIZE)
        ]
        self.url = ",".join(member.url for member in self.members)

    async def start(self) -> None:
        """Start all members; return when they have elected a leader, some seconds later."""
        for number in range(SIZE):
            await self.restart(number)
        await self.wait_current()

    async def stop(self) -> None:
        for number in range(SIZE):
            self.resume(number)
        await asyncio.gather(*(asyncio.to_thread(member.stop) for member in self.members))
        for number in range(SIZE):
            network.remove_group(self.group(number))

    def group(self, number: int) -> str:
        """Return the cgroup of a member's process, for `network.dropping`."""
        return f"pagemill-{os.getpid()}-n{number}"

    # -- faults -----------------------------------------------------------------------------

    def kill(self, number: int) -> None:
        """Kill a member, which stays down until it is restarted."""
        self._signal(number, signal.SIGKILL)

    async def terminate(self, number: int) -> None:
        await asyncio.to_thread(self.members[number].stop)

    async def restart(self, number: int) -> None:
        await asyncio.to_thread(self.start_member, number)

    def start_member(self, number: int) -> None:
        """Start a member that is not running, on its store; this takes about 0.1 s."""
        with network.started_in(self.group(number)):
            self.members[number].start()

    def pid(self, number: int) -> int:
        return int(self.members[number].pid_file.read_text())

    def pause(self, number: int) -> None:
        self._signal(number, signal.SIGSTOP)

    def resume(self, number: int) -> None:
        self._signal(number, signal.SIGCONT)

    def _signal(self, number: int, how: signal.Signals) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, ValueError):
            os.kill(self.pid(number), how)

    # -- waiting ----------------------------------------------------------------------------

    async def leader_of(self, stream: str) -> int | None:
        """Return the member that leads a stream, or None without a leader or an answer."""
        with contextlib.suppress(*_Down):
            async with self._connected() as nc:
                info = await _ask(nc, f"STREAM.INFO.{stream}")
                leader = info.get("cluster", {}).get("leader")
                return int(leader.removeprefix("n")) if leader else None
        return None

    async def change_leaders(self, stream: str, consumers: Iterable[str]) -> None:
        """Have these consumers elect other leaders. Raises Unavailable."""
        async with self._connected() as nc:
            for consumer in consumers:
                answer = await _ask(nc, f"CONSUMER.LEADER.STEPDOWN.{stream}.{consumer}")
                if "error" in answer:
                    raise Unavailable(f"{consumer}: {answer['error']}")

    async def wait_current(self, timeout_s: float = READY_TIMEOUT_S) -> float:
        """Wait until all streams and consumers have a leader and all their replicas are current.

        Return the seconds that this took. Raises Unavailable, saying what is missing.
        """
        began = time.monotonic()
        missing = "no server answers"
        while time.monotonic() - began < timeout_s:
            with contextlib.suppress(*_Down):
                async with self._connected() as nc:
                    missing = await _missing(nc)
                if not missing:
                    return time.monotonic() - began
            await asyncio.sleep(POLL_S)
        raise Unavailable(f"the cluster is not current after {timeout_s:.0f} s: {missing}")

    @contextlib.asynccontextmanager
    async def _connected(self) -> AsyncIterator[Client]:
        """Connect to the first member that answers. Raises one of `_Down` if none does."""
        for member in self.members:
            nc = Client()
            with contextlib.suppress(*_Down):
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await nc.connect(member.url, allow_reconnect=False, error_cb=ignore_error)
            if nc.is_connected:
                break
            await nc.close()
        else:
            raise OSError("no member answers")
        try:
            yield nc
        finally:
            await nc.close()


async def _ask(nc: Client, operation: str) -> dict[str, Any]:
    answer = await nc.request(f"$JS.API.{operation}", b"", timeout=ANSWER_TIMEOUT_S)
    decoded: dict[str, Any] = json.loads(answer.data)
    return decoded


async def _missing(nc: Client) -> str:
    """Return the first defect of a stream or consumer, or an empty string if there is none."""
    listed = await _ask(nc, "STREAM.LIST")
    if "error" in listed:
        return str(listed["error"].get("description"))
    for stream in listed.get("streams") or []:
        name = stream["config"]["name"]
        if defect := _lacking(stream):
            return f"stream {name}: {defect}"
        consumers = await _ask(nc, f"CONSUMER.LIST.{name}")
        for consumer in consumers.get("consumers") or []:
            if defect := _lacking(consumer):
                return f"consumer {name}/{consumer['name']}: {defect}"
    if listed.get("missing") or listed.get("offline"):
        return "streams that do not answer"
    return ""


def _lacking(info: dict[str, Any]) -> str:
    cluster = info.get("cluster", {})
    if not cluster.get("leader"):
        return "no leader"
    replicas = cluster.get("replicas") or []
    late = [r["name"] for r in replicas if not _follows(r)]
    return f"not current: {', '.join(late)}" if late else ""


def _follows(replica: dict[str, Any]) -> bool:
    """Return whether a follower is current and alive.

    A dead follower is reported as current until it has missed a message.
    """
    silent_s = replica.get("active", 0) / 1e9
    return bool(replica.get("current")) and not replica.get("offline") and silent_s < MAX_SILENT_S


async def ignore_error(_: Exception) -> None:
    """Ignore a lost connection, as runs kill brokers; by default nats-py writes it to stderr."""
