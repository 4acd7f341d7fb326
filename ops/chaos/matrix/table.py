"""The table of the fault matrix: cells, their faults and bounds, and what they need to run."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from ops.chaos import alterations
from ops.chaos.matrix.cells import (
    common,
    encoders,
    members,
    memory,
    networks,
    overload,
    payloads,
    poison,
    processes,
    servers,
    workplaces,
)
from ops.chaos.matrix.deployment import Disturb
from ops.chaos.plan import Mix
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell: `run` injects the fault; without it `why_not` says why the cell cannot run."""

    name: str
    how: str
    bound: str = ""
    run: Disturb | None = None
    why_not: str = ""
    needs: Callable[[], str | None] = lambda: None
    on: str = "single"
    load_s: float = 6.0
    change: dict[str, Any] = field(default_factory=dict)
    """Changes of the load's settings."""
    known: str = ""
    """A documented limit that explains a violation."""

    @property
    def reason(self) -> str | None:
        return self.why_not or self.needs()


# -- the table --------------------------------------------------------------------------------


def _process_cells() -> Iterator[Cell]:
    for role in ("coordinator", "renderer", "encoder", "engine", LOAD, "gateway"):
        yield from _cells_of(role)
    yield Cell(
        "encoder: all of them stopped",
        "kill -STOP of all, 4 s",
        "5 s beside it",
        encoders.all_away,
        on="encoders",
        load_s=14,
    )
    yield Cell(
        "encoder: an embedding is lost",
        "kill -9 of all when it is published, before an engine has read it",
        "computed again",
        encoders.embedding_lost,
        on="encoders",
        load_s=14,
    )


DEPLOYMENT_OF = {"encoder": "encoders", "gateway": "gateways"}


def _cells_of(role: str) -> Iterator[Cell]:
    name = "client" if role == LOAD else role
    for cell in _faults_of(role, name):
        yield replace(cell, on=DEPLOYMENT_OF.get(role, "single"))


def _faults_of(role: str, name: str) -> Iterator[Cell]:
    yield Cell(f"{name}: SIGKILL", "kill -9, three times", "5 s", processes.sigkill(role), load_s=8)
    yield Cell(
        f"{name}: SIGSTOP",
        f"kill -STOP, {common.STOP_S:.0f} s, kill -CONT",
        "5 s beside it",
        processes.sigstop(role),
        load_s=22,
    )
    yield Cell(f"{name}: SIGTERM", "kill -TERM under load", "30 s, exit 0", processes.drain(role))
    yield Cell(
        f"{name}: rolling restart", "each in turn, twice", "no failure", processes.rolling(role)
    )
    yield Cell(
        f"{name}: OOM",
        "memory cgroup, kernel's OOM killer, twice",
        "5 s",
        processes.out_of_memory(role),
        needs=memory.why_no_memory_limit,
    )
    yield Cell(
        f"{name}: bad network",
        "packet loss 30 % (iptables), 200 ms delay, cut mid-frame, half-open, reset (proxy)",
        "7 s",
        networks.bad_network(role),
        needs=network.why_unavailable,
        load_s=14,
    )


BROKER = [
    Cell("broker: SIGKILL", "kill -9", "3 s", servers.broker_killed(1, 1.5)),
    Cell("broker: SIGSTOP 30 s", "kill -STOP", "3 s", servers.broker_stopped(30.0), load_s=20),
    Cell("broker: SIGTERM", "kill -TERM", "3 s", servers.broker_terminated),
    Cell("broker: killed every 2 s", "kill -9", "3 s", servers.broker_killed(8, 2.0), load_s=18),
    Cell(
        "broker: OOM",
        "memory cgroup",
        "3 s",
        servers.broker_out_of_memory,
        needs=memory.why_no_memory_limit,
    ),
    Cell(
        "broker: packet loss 30 %",
        "iptables on its port",
        "7 s",
        servers.broker_lossy,
        needs=network.why_unavailable,
        load_s=10,
    ),
    Cell("broker: disk full", "tmpfs of 24 MiB", "3 s", servers.disk_full, on="disk", load_s=10),
    Cell(
        "broker: queue at its limit",
        "8 MB of requests, limit 2 MiB",
        "refused in 1 s",
        servers.queue_at_its_limit,
        on="tight",
        change={"mix": Mix(deadline=0)},
    ),
]

CLUSTER = [
    Cell("cluster: kill leader", "kill -9, twice", "10 s", members.member_killed(leader=True)),
    Cell("cluster: kill follower", "kill -9, twice", "10 s", members.member_killed(leader=False)),
    Cell("cluster: kill 2 of 3", "kill -9, down for 6 s", "10 s", members.members_down(2)),
    Cell("cluster: kill all 3", "kill -9, down for 6 s", "10 s", members.members_down(3)),
    Cell(
        "cluster: SIGSTOP leader",
        "kill -STOP, 15 s",
        "10 s",
        members.leader_stopped,
        known="a frozen server is missed after 6 s, and a new leader elected 4 to 9 s after that",
    ),
    Cell(
        "cluster: leader isolated",
        "iptables by cgroup, 12 s",
        "10 s",
        members.member_isolated(leader=True),
        needs=network.why_unavailable,
    ),
    Cell(
        "cluster: clients cut from the leader",
        "iptables by port, 11 s",
        "10 s",
        members.clients_cut_from_the_leader,
        needs=network.why_unavailable,
    ),
    Cell("cluster: rolling restart", "SIGTERM, one by one", "10 s", members.rolling_members),
    Cell("cluster: leader's disk full", "tmpfs of 256 MiB", "10 s", members.leader_disk_full),
    Cell(
        "cluster: follower corrupted",
        "one bit of its .blk files, then fail over",
        "detected",
        members.follower_corrupted,
        known="a documented limit of nats-server (Jepsen, issue 7549)",
    ),
]

SHARED_MEMORY = [
    Cell(
        "shared memory: writer killed",
        "kill -9 of renderers while engines read for 0.5 s, three times",
        "5 s",
        payloads.killed_while_read("renderer"),
        load_s=12,
    ),
    Cell(
        "shared memory: reader killed",
        "kill -9 of engines while they read for 0.5 s, three times",
        "5 s",
        payloads.killed_while_read("engine"),
        load_s=12,
    ),
    Cell(
        "shared memory: writer truncates",
        "truncate of /proc/PID/fd/N, as root",
        "refused",
        payloads.owner_truncates,
    ),
    Cell(
        "shared memory: /dev/shm full",
        "renderers in a mount namespace with a full tmpfs there",
        "5 s",
        payloads.no_shm,
    ),
    Cell(
        "shared memory: stale generation",
        "the key of a request that has ended",
        "lost",
        payloads.stale_reference,
    ),
    Cell("shared memory: forged handle", "random keys", "lost", payloads.forged_reference),
    Cell(
        "shared memory: owner frozen",
        "kill -STOP of a renderer whose payloads are unread",
        f"{payloads.FROZEN_S:.0f} s",
        payloads.owner_frozen,
        load_s=4,
    ),
    Cell(
        "shared memory: arena full",
        "12 MiB for four requests of 10 MiB, engines stopped for 4 s",
        "no error",
        payloads.arena_full,
    ),
    Cell(
        "shared memory: no local socket",
        "engines cannot connect to it",
        "by TCP",
        payloads.without_transports(alterations.no_local_socket, left="TcpTransport"),
    ),
    Cell(
        "shared memory: no socket at all",
        "nor by TCP",
        "by the broker",
        payloads.without_transports(alterations.no_sockets, left="BusTransport"),
    ),
]

DISK = [
    Cell(
        "disk: log disk full", "stderr of workers on a full tmpfs", "5 s", workplaces.log_disk_full
    ),
    Cell("disk: cache disk full", "", why_not="no worker caches anything on a disk"),
    Cell(
        "disk: read-only root",
        "workers in a mount namespace without a writable path",
        "5 s",
        workplaces.read_only_root,
    ),
]

SLOW = [
    Cell(
        "slow: client stops reading", "proxy holds, 8 s", "", networks.reader_that_stops, load_s=9
    ),
    Cell(
        "slow: gateway stalls",
        "kill -STOP, 5 s, kill -CONT",
        "5 s beside it",
        processes.sigstop("gateway", 5.0),
        on="gateways",
        load_s=9,
    ),
    Cell(
        "slow: engine slower than renderer",
        "engines stopped for 4 s, 40 long prompts",
        "",
        overload.engine_slower_than_renderer,
        on="tight",
        change={"mix": Mix(deadline=0)},
    ),
    Cell(
        "slow: flood in the batch lane",
        "10x beside the load (run before there were tenants)",
        "",
        overload.batch_flood,
    ),
]

CLOCK = [
    Cell(
        f"clock: {what}",
        f"libfaketime {fake_time} on one worker of each role",
        "deadline + 2 s",
        workplaces.clock(fake_time),
        needs=workplaces.why_no_faketime,
        load_s=10,
    )
    for what, fake_time in (("+1 h", "+1h"), ("-1 h", "-1h"), ("drift 2 s/s", "+0 x3"))
] + [
    Cell("clock: none read", "a search of the source", "", workplaces.no_wall_clock, load_s=1),
]

PARTITION = [
    Cell(
        "partition: worker from broker",
        "proxy holds, one of each role, 10 s",
        "7 s",
        networks.all_workers_blackholed,
        load_s=14,
    ),
    Cell("partition: one way", "proxy holds one direction", "7 s", networks.one_way, load_s=20),
    Cell(
        "partition: client from broker",
        "proxy holds, 10 s",
        "7 s",
        networks.blackholed(LOAD),
        load_s=14,
    ),
    Cell(
        "partition: gateway from broker",
        "proxy holds, 10 s",
        "7 s",
        networks.blackholed("gateway"),
        on="gateways",
        load_s=14,
    ),
    Cell(
        "partition: minority of brokers",
        "iptables by cgroup, 12 s",
        "10 s",
        members.member_isolated(leader=False),
        needs=network.why_unavailable,
        on="cluster",
        load_s=20,
        known="a client of the server that is cut off sees nothing new until it is back",
    ),
    Cell(
        "partition: flapping", "proxy, 1 s on, 1 s off, 20 s", "7 s", networks.flapping, load_s=22
    ),
    Cell(
        "partition: healed after the deadline",
        "proxy holds both engines",
        "deadline + 2 s",
        networks.healed_after_the_deadline,
        load_s=8,
    ),
]

POISON = [
    Cell(
        "poison: raises in render",
        "at every attempt",
        "dead letter",
        poison.raises_in_render,
        on="poison",
    ),
    Cell("poison: raises in encode", "", why_not="a test: tests/encoder/test_tower.py"),
    Cell("poison: raises in a step", "at every attempt", "dead letter", poison.raises, on="poison"),
    Cell("poison: kills the worker", "SIGKILL from inside", "2 deaths", poison.kills, on="poison"),
    Cell(
        "poison: hangs the step",
        "for ever, in every engine",
        "its deadline",
        poison.hangs,
        on="poison",
        load_s=8,
    ),
]

OVERLOAD = [
    Cell(
        "overload: 10x rate",
        "100 requests a second into a queue of 60",
        "refused in 1 s",
        overload.only_load,
        on="tight",
        change={
            "rate": 100.0,
            "requests": 600,
            "concurrency": 300,
            "max_tokens": (2, 24),
            "mix": Mix(deadline=0),
        },
    ),
    Cell(
        "overload: KV exhausted",
        "136 blocks for 16 sequences",
        "",
        overload.only_load,
        on="tight",
        change={"mix": Mix(deadline=0), "rate": 20.0, "requests": 120},
    ),
    Cell(
        "overload: 1,000 queued, then cancelled",
        "engines stopped meanwhile",
        "30 s",
        overload.queued_then_cancelled,
    ),
    Cell("overload: max_ack_pending", "has none", "", overload.no_common_credit, load_s=1),
]

CELLS = [
    *_process_cells(),
    *BROKER,
    *(replace(cell, on="cluster", load_s=20.0) for cell in CLUSTER),
    *(replace(cell, on="payloads") for cell in SHARED_MEMORY),
    *DISK,
    *SLOW,
    *CLOCK,
    *PARTITION,
    *POISON,
    *OVERLOAD,
]
