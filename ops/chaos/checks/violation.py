"""A promise that a run has broken."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Violation:
    invariant: str
    subject: str
    """Id of a request, or name of a process."""
    what: str

    def __str__(self) -> str:
        return f"{self.invariant} {self.subject}: {self.what}"
