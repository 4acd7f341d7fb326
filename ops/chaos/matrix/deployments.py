"""The kinds of deployments that cells need, by name."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from msgspec.structs import replace

from ops.chaos.matrix.cell import Disturb
from ops.chaos.matrix.deployment import Deployment
from ops.chaos.matrix.outcome import Outcome
from ops.chaos.matrix.whole_system import Limits, WholeSystem
from ops.chaos.plan import Mix, Settings

DISK_MIB, MEMBER_DISK_MIB = 24, 256
# Requests take seconds, so that there are always some in flight.
BASE = Settings(
    requests=60,
    rate=10.0,
    coordinators=2,
    renderers=2,
    engines=2,
    renderer="fake",
    max_tokens=(8, 120),
    step_ms=8.0,
    mix=Mix(cancel=0.06, resubmit_during=0.05, resubmit_after=0.04, follow=0.05, deadline=0.04),
)


class System(Protocol):
    """A system on which cells run, one after the other, each with a separate load."""

    settings: Any
    """Settings of the load: a Struct with the seed, the number of requests and their rate."""
    folder: Path
    outcome: Outcome

    async def open(self) -> None: ...

    async def close(self) -> None: ...

    def remove(self) -> None: ...

    async def run(self, settings: Any, disturb: Disturb) -> Outcome: ...


DEPLOYMENTS: dict[str, Callable[[], System]] = {
    "single": lambda: Deployment(BASE),
    "cluster": lambda: Deployment(replace(BASE, brokers=3), disk_mib=MEMBER_DISK_MIB),
    # Every engine waits at every queue, so a change of leaders loses many pulls.
    "slots": lambda: Deployment(replace(BASE, brokers=3, slots=4), disk_mib=MEMBER_DISK_MIB),
    # Two deaths make a request count as poison. On other deployments, faults kill workers.
    "poison": lambda: Deployment(replace(BASE, max_deaths=2, max_deliver=5)),
    # All limits are low.
    "tight": lambda: Deployment(
        replace(BASE, max_queued=60, num_blocks=136),
        delivery={"max_request_mib": 2, "max_stage_mib": 8},
    ),
    # Most requests have images, and payloads come by any transport.
    "payloads": lambda: Deployment(replace(BASE, mix=replace(BASE.mix, images=0.7), listen=True)),
    # Engines have no towers; most requests have images, clips or sounds.
    "encoders": lambda: Deployment(
        replace(
            BASE,
            engine="demo",
            renderer="real",
            encoders=2,
            rate=4.0,
            renderers=1,
            max_tokens=(8, 48),
            mix=replace(BASE.mix, images=0.7, clips=0.3, sounds=0.3),
        )
    ),
    # Each engine has two processes.
    "ranks": lambda: Deployment(
        replace(
            BASE,
            engine="demo",
            renderer="real",
            renderers=1,
            ranks=2,
            rate=4.0,
            max_tokens=(8, 48),
        )
    ),
    # Most requests go through gateways.
    "gateways": lambda: Deployment(replace(BASE, gateways=2, mix=replace(BASE.mix, http=0.7))),
    "disk": lambda: Deployment(BASE, disk_mib=DISK_MIB),
    # `pagemill up` with clients of tenants that share no code with it.
    "up": lambda: WholeSystem(),
    # nats-server takes at most half of the descriptors for connections.
    "up, few files": lambda: WholeSystem(Limits(max_files=1024)),
    "up, small disk": lambda: WholeSystem(Limits(disk_mib=96, min_free_mib=32)),
}
