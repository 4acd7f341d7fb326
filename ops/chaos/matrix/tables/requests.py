"""Cells of the fault matrix about harmful and too many requests."""

from ops.chaos.matrix.cell import Cell
from ops.chaos.matrix.cells import overload, poison
from ops.chaos.plan import Mix

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
