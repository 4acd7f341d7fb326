"""Cells of the fault matrix about disks, clocks, networks and slow processes."""

from ops.chaos.matrix.cell import Cell
from ops.chaos.matrix.cells import members, networks, overload, processes, workplaces
from ops.chaos.plan import Mix
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD

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
