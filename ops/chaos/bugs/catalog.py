"""All planted bugs: each replaces a piece of the product from outside, and the checker must see it.

A harness that has never found a bug may be unable to. Each bug is one that a programmer could
write. It has a small scenario that triggers it, and invariants; the checker must report a violation
of one of them.
"""

from msgspec.structs import replace

# Importing these modules registers their bugs.
from ops.chaos.bugs import (  # noqa: F401
    agents,
    batches,
    clips,
    engine,
    gateway,
    images,
    payloads,
    resume,
    scaling,
    shares,
    speech,
    stages,
    token_log,
)
from ops.chaos.bugs.registry import BUGS
from ops.chaos.bugs.scenarios import SCENARIOS
from ops.chaos.plan import Settings


def plant(name: str, role: str) -> None:
    """Plant the bug in this process; no effect for an empty name or a bug of another role."""
    if name and BUGS[name].role in (role, "any"):
        BUGS[name].plant()


def settings_of(name: str) -> Settings:
    """Return the settings of a bug's scenario, with the bug."""
    return replace(SCENARIOS[BUGS[name].scenario], bug=name)
