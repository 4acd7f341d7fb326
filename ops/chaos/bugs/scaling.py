"""Bugs of autoscaling. `tests/autoscaler/test_bugs.py` has a check in one process for each as well.

Requests alone would show none of them: a task that is lost by a kill is delivered again, and a pool
that is too small is only late.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, wrap


@bug("actuator", "scaled to zero", "I15")
def scale_down_by_sigkill() -> None:
    """Workers that are scaled down cannot finish or requeue their tasks."""
    from workers.supervisor.supervisor import Process, Supervisor

    def kill(self: Supervisor, process: Process) -> None:
        process.kill()

    replace_attribute(Supervisor, "_end_later", kill)


@bug("autoscaler", "scaled without a queue", "I15")
def missing_read_as_zero() -> None:
    """A queue that the broker does not report counts as empty."""
    from shared.protocol import subjects
    from workers.autoscaler import figures
    from workers.pools import Pool

    @wrap(figures, "_figures_of")
    def hopeful(read: Any, pool: Pool, look: figures.Look, before: Counter[str]) -> Any:
        empty = figures.Queue(0, 0, 0.0)
        keys = [(pool.stage, m, lane) for m in pool.models for lane in subjects.LANES]
        queues = {**dict.fromkeys(keys, empty), **look.queues}
        return read(pool, figures.Look(queues, look.workers, look.actuators), before)


@bug("autoscaler", "scaled with a frozen engine", "I15")
def silence_read_as_no_workers() -> None:
    """A worker without heartbeats always counts as one that starts."""
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
