"""The fault matrix: all cells, in the order of the report."""

from ops.chaos.matrix.cell import REGISTERED

# Importing these modules registers their cells.
from ops.chaos.matrix.cells import (  # noqa: F401
    decoders,
    encoders,
    members,
    networks,
    overload,
    payloads,
    poison,
    processes,
    servers,
    tenants,
    whole_systems,
    workplaces,
)

GROUPS = (
    "coordinator",
    "renderer",
    "encoder",
    "engine",
    "client",
    "gateway",
    "broker",
    "cluster",
    "slots",
    "shared memory",
    "disk",
    "slow",
    "clock",
    "partition",
    "poison",
    "overload",
    "tenants",
    "up",
)
CELLS = sorted(REGISTERED, key=lambda cell: GROUPS.index(cell.name.partition(":")[0]))
