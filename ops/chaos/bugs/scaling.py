"""Bugs of autoscaling. They need no scenario: `tests/autoscaler/test_bugs.py` has a check for each.

An autoscaler and an actuator decide and act in one process, and requests show nothing that the
checks of workers would not: what is lost by a kill is delivered again.
"""

from collections import Counter
from collections.abc import Callable

from ops.chaos.patching import replace_attribute


def scale_down_by_sigkill() -> None:
    """Workers that have to go cannot finish or requeue what they have."""
    from workers.cli.local_cluster import LocalCluster, Process

    def kill(self: LocalCluster, process: Process) -> None:
        process.kill()

    replace_attribute(LocalCluster, "_end_later", kill)


def missing_read_as_zero() -> None:
    """A queue that the broker does not report counts as an empty one."""
    from shared.protocol import subjects
    from shared.scaling.pools import PoolFigures
    from workers.autoscaler import figures
    from workers.pools import Pool

    read = figures._figures_of

    def hopeful(pool: Pool, look: figures.Look, before: Counter[str]) -> PoolFigures | None:
        empty = figures.Queue(0, 0, 0.0)
        keys = [(pool.stage, m, lane) for m in pool.models for lane in subjects.LANES]
        queues = {**dict.fromkeys(keys, empty), **look.queues}
        return read(pool, figures.Look(queues, look.workers, look.actuator), before)

    replace_attribute(figures, "_figures_of", hopeful)


def silence_read_as_no_workers() -> None:
    """A broker that has lost the heartbeats makes every worker look like one that starts."""
    from shared.protocol.messages import Heartbeat, WorkerSlot
    from shared.scaling.pools import WorkerLoad
    from workers.autoscaler.presence import Presence, _load

    def forgetful(self: Presence, slot: WorkerSlot, beat: Heartbeat | None) -> WorkerLoad | None:
        return None if beat is None else _load(str(slot.slot), beat)

    replace_attribute(Presence, "_load_of", forgetful)


BUGS: tuple[Callable[[], None], ...] = (
    scale_down_by_sigkill,
    missing_read_as_zero,
    silence_read_as_no_workers,
)
