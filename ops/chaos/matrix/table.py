"""The fault matrix: all cells, in the order of the report."""

from dataclasses import replace

from ops.chaos.matrix.tables import brokers, environment, payloads, processes, requests

CELLS = [
    *processes.process_cells(),
    *brokers.BROKER,
    *(replace(cell, on="cluster", load_s=20.0) for cell in brokers.CLUSTER),
    *(replace(cell, on="slots", load_s=20.0) for cell in brokers.SLOTS),
    *(replace(cell, on="payloads") for cell in payloads.SHARED_MEMORY),
    *environment.DISK,
    *environment.SLOW,
    *environment.CLOCK,
    *environment.PARTITION,
    *requests.POISON,
    *requests.OVERLOAD,
]
