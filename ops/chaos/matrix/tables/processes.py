"""Cells of the fault matrix in which processes of one role fail."""

from collections.abc import Iterator
from dataclasses import replace

from ops.chaos.matrix.cell import Cell
from ops.chaos.matrix.cells import common, decoders, encoders, memory, networks, processes
from ops.chaos.processes import network
from ops.chaos.processes.pool import LOAD


def process_cells() -> Iterator[Cell]:
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
    yield Cell(
        "renderer: decoders killed",
        "kill -9 of half of the decoders of videos, or of what they are forked from",
        "the same tokens",
        decoders.decoders_killed,
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
