"""Tool calls that an agent makes, and not the client. Pure."""

from dataclasses import dataclass, field

from shared.protocol.steps import Result, Sending
from shared.responses.tools import PAINT, PromptTool


@dataclass(slots=True)
class ServerCall:
    """A call of the image tool, or of a tool of an MCP server."""

    turn: int
    number: int
    label: str
    """Label of the MCP server; empty for the image tool."""
    name: str
    arguments: str
    position: int
    """Index of its item in the output."""
    tool: PromptTool | None = None
    """None if the server no longer has the tool."""
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
