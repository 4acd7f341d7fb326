"""Alterations of workers in the fault matrix, by name.

A cell sets CHAOS_ALTERATION in the environment of a worker, which applies the alteration at its
start. In contrast to a planted bug, the system must work correctly with it.
"""

import asyncio
import select
import time
import types
from collections.abc import Callable
from typing import Any, NoReturn

from ops.chaos import fake_model
from ops.chaos.patching import replace_attribute, wrap
from shared.blobs import transports
from shared.blobs.store import Blobs
from shared.protocol.requests import Prompt
from workers.engine.core.sequence import Sequence

RAISING_TEXT = "raise in the renderer"
READ_S = 0.5
HANG_S = 3600.0


def slow_reader() -> None:
    """Make each read of a payload last half a second longer."""

    @wrap(Blobs, "get")
    async def get(original: Any, self: Blobs, *args: Any) -> Any:
        blob = await original(self, *args)
        await asyncio.sleep(READ_S)
        return blob


def no_local_socket() -> None:
    """Refuse connections to local sockets, so that payloads come by TCP."""
    replace_attribute(transports.SharedMemoryTransport, "_connect", _refuse)


def no_sockets() -> None:
    """Refuse connections to owners, so that payloads come through the broker."""
    no_local_socket()
    replace_attribute(transports.TcpTransport, "_connect", _refuse)


def _refuse(self: object) -> NoReturn:
    raise ConnectionRefusedError("this worker's connections are refused")


def raising_renderer() -> None:
    """Raise when one text is rendered."""
    tokenize = fake_model.FakeProcessor.tokenize

    def poisoned(self: fake_model.FakeProcessor, prompt: Prompt) -> list[int]:
        if any(message.content == RAISING_TEXT for message in prompt.messages):
            raise RuntimeError("a poisoned prompt")
        return tokenize(self, prompt)

    replace_attribute(fake_model.FakeProcessor, "tokenize", poisoned)


def hanging_engine() -> None:
    """Make each step with a hanging request last an hour, in every engine."""

    def harm(self: fake_model.FakeRunner, sequence: Sequence, *_: object) -> None:
        if sequence.seed == fake_model.HANGS_SEED:
            time.sleep(HANG_S)

    replace_attribute(fake_model.FakeRunner, "_harm", harm)


def sleep_by_select() -> None:
    """Make the sleep of the fake engine work under libfaketime.

    libfaketime breaks time.sleep, which waits for an absolute time of a clock that is not faked.
    """

    def sleep(seconds: float) -> None:
        select.select([], [], [], seconds)

    setattr(fake_model, "time", types.SimpleNamespace(sleep=sleep))  # noqa: B010


ALTERATIONS: dict[str, Callable[[], None]] = {
    alteration.__name__: alteration
    for alteration in (
        slow_reader,
        no_local_socket,
        no_sockets,
        raising_renderer,
        hanging_engine,
        sleep_by_select,
    )
}


def environment(alteration: Callable[[], None]) -> tuple[str, str]:
    """Return the command prefix under which a worker applies the alteration."""
    return "env", f"CHAOS_ALTERATION={alteration.__name__}"


def apply(name: str) -> None:
    """Apply the alteration in this process; no effect for an empty name."""
    if name:
        ALTERATIONS[name]()
