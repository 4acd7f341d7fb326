"""The cells of the fault matrix, which are functions with a decorator."""

from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from ops.chaos.processes.pool import LOAD

Run = TypeVar("Run", bound=Callable[..., Coroutine[Any, Any, None]])
Disturb = Callable[[Any], Coroutine[Any, Any, None]]
"""Function of a cell, which is called with the system of the kind that the cell names."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A cell. `run` injects the fault; without it, `why_not` is the reason."""

    name: str
    how: str
    bound: str = ""
    run: Disturb | None = None
    why_not: str = ""
    needs: Callable[[], str | None] = lambda: None
    on: str = "single"
    load_s: float = 6.0
    change: dict[str, Any] = field(default_factory=dict)
    """Changes of the load's settings."""
    limit: str = ""
    """A documented limit that explains a violation."""

    @property
    def reason(self) -> str | None:
        return self.why_not or self.needs()


REGISTERED: list[Cell] = []
"""All cells, in the order of their functions; `table` has the order of the report."""


def cell(
    name: str,
    how: str,
    bound: str = "",
    *,
    needs: Callable[[], str | None] = lambda: None,
    on: str = "single",
    load_s: float = 6.0,
    change: dict[str, Any] | None = None,
    limit: str = "",
    **arguments: object,
) -> Callable[[Run], Run]:
    """Register the decorated function as a cell that calls it with these arguments."""

    def register(run: Run) -> Run:
        called: Disturb = partial(run, **arguments)
        REGISTERED.append(
            Cell(name, how, bound, called, "", needs, on, load_s, change or {}, limit)
        )
        return run

    return register


def cannot_run(name: str, why_not: str) -> None:
    """Register a cell of the design that has no function, and the reason."""
    REGISTERED.append(Cell(name, "", why_not=why_not))


# Names of roles in the report, and the deployments on which their faults are injected.
ROLES = {
    "coordinator": ("coordinator", "single"),
    "renderer": ("renderer", "single"),
    "encoder": ("encoder", "encoders"),
    "engine": ("engine", "single"),
    LOAD: ("client", "single"),
    "gateway": ("gateway", "gateways"),
}


def cell_of_each_role(
    fault: str,
    how: str,
    bound: str,
    *,
    needs: Callable[[], str | None] = lambda: None,
    load_s: float = 6.0,
) -> Callable[[Run], Run]:
    """Register the decorated function as a cell of each role, with which it is called."""

    def register(run: Run) -> Run:
        for role, (name, on) in ROLES.items():
            of_role = cell(
                f"{name}: {fault}", how, bound, needs=needs, on=on, load_s=load_s, role=role
            )
            of_role(run)
        return run

    return register
