"""Interface with which the renderer's modules run blocking functions in its thread pool."""

from collections.abc import Callable
from typing import Protocol, TypeVar, TypeVarTuple

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


class InThread(Protocol):
    """Runs a blocking function in a thread and returns its result."""

    async def __call__(self, function: Callable[[*Args], Result], *args: *Args) -> Result: ...
