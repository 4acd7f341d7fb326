"""Calls of tools that are made here, and not by the client. Pure."""

from dataclasses import dataclass, field

from shared.protocol.steps import Result, Sending
from shared.responses.tools import PAINT, PromptTool


@dataclass(slots=True)
class ServerCall:
    """A call of an MCP server's tool, or of the one that paints."""

    turn: int
    number: int
    label: str
    """Empty for an image."""
    name: str
    arguments: str
    position: int
    """Index of its item in the output."""
    tool: PromptTool | None = None
    """None if the server has no such tool any more."""
    over_limit: bool = False
    sendings: list[Sending] = field(default_factory=list)
    result: Result | None = None

    @property
    def is_pending(self) -> bool:
        return self.result is None

    @property
    def paints(self) -> bool:
        return self.name == PAINT and not self.label

    def __str__(self) -> str:
        return self.name if self.paints else f"{self.label}.{self.name}"
