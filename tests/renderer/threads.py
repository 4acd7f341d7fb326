"""A worker's way to run blocking functions, as the renderer's parts get it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar, TypeVarTuple

Result = TypeVar("Result")
Args = TypeVarTuple("Args")


async def in_thread(function: Callable[[*Args], Result], *args: *Args) -> Result:
    return await asyncio.to_thread(function, *args)
