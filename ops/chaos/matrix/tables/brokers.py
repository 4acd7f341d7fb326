"""Cells of the fault matrix in which nats-servers fail."""

from ops.chaos.matrix.cell import Cell
from ops.chaos.matrix.cells import members, memory, servers
from ops.chaos.plan import Mix
from ops.chaos.processes import network

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

SLOTS = [
    Cell("slots: kill leader", "kill -9, twice", "10 s", members.member_killed(leader=True)),
    Cell(
        "slots: all queues change leaders",
        "step down, five times",
        "10 s",
        members.leaders_of_queues_change,
    ),
]
