"""Thread that runs the engine core: takes requests, inputs and cancellations, returns outputs.

The thread and asyncio exchange plain objects through queues, and neither side waits for the other.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar

from workers.engine.core.engine import EngineCore
from workers.engine.core.engine_stats import EngineStats
from workers.engine.core.request_errors import error_of_request
from workers.engine.core.sequence import EngineRequest, RequestOutput, SpokenText

LAST_STEP_S = 1.0
"""Time that `stop` waits for the current step."""

Owner = TypeVar("Owner")


class _Growth(NamedTuple):
    request_id: str
    speech: SpokenText


class _Encoded(NamedTuple):
    request_id: str
    mm_hash: str
    embedding: Any


class StepThread(Generic[Owner]):
    """Runs the steps of an engine core, which no other thread may use after the start.

    Every output is returned with the owner that was added with its request. The request id is not
    sufficient: outputs of an earlier attempt may still be queued when the next attempt starts.
    """

    def __init__(
        self,
        core: EngineCore,
        on_step: Callable[[list[tuple[Owner, RequestOutput]], EngineStats], object],
        on_crash: Callable[[Exception], object],
    ) -> None:
        """Both callbacks are called in the thread: `on_step` after each step, `on_crash` once."""
        self._core = core
        self._on_step = on_step
        self._on_crash = on_crash
        self.began_s = 0.0
        """Start of the last step on the monotonic clock, for use by `on_step`."""
        self._step_began_s: float | None = None
        self._owners: dict[str, Owner] = {}
        self._commands: queue.SimpleQueue[
            tuple[EngineRequest, Owner] | _Growth | _Encoded | str | None
        ] = queue.SimpleQueue()
        self._is_idle = False
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest, owner: Owner) -> None:
        self._commands.put((request, owner))

    def extend_speech(self, request_id: str, speech: SpokenText) -> None:
        """Give a talker more of the text of a request."""
        self._commands.put(_Growth(request_id, speech))

    def take_embedding(self, request_id: str, mm_hash: str, embedding: Any) -> None:
        """Give a request the embedding of an item, [num_embeds, width], or the tower's error."""
        self._commands.put(_Encoded(request_id, mm_hash, embedding))

    def cancel(self, request_id: str) -> None:
        """Cancel a request; its blocks are free before the next step starts."""
        self._commands.put(request_id)

    def stop(self) -> None:
        """End the thread after its current step; a thread that hangs is abandoned."""
        self._commands.put(None)
        self._thread.join(LAST_STEP_S)

    @property
    def step_s(self) -> float:
        """Duration of the current step so far; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    @property
    def is_idle(self) -> bool:
        """Whether the thread is idle: all requests wait for other workers, or for the tower."""
        return self._is_idle

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:
            self._on_crash(error)

    def _step_until_stopped(self) -> None:
        while True:
            outputs: list[tuple[Owner, RequestOutput]] = []
            # An idle loop blocks on the queue; a busy loop polls it between steps.
            while not self._commands.empty() or not (self._core.has_work or outputs):
                self._is_idle = True
                command = self._commands.get()
                self._is_idle = False
                if command is None:
                    return
                if isinstance(command, _Growth):
                    self._core.extend_speech(*command)
                    continue
                if isinstance(command, _Encoded):
                    self._core.take_embedding(*command)
                    continue
                if isinstance(command, str):
                    self._core.cancel(command)
                    self._owners.pop(command, None)
                    if not self._core.has_work:
                        self._on_step([], self._core.stats())
                else:
                    outputs += self._add(*command)
            self._step_began_s = self.began_s = time.monotonic()
            step_outputs = self._core.step()
            self._core.observe_time(time.monotonic() - self.began_s)
            self._step_began_s = None
            outputs += [(self._owners[output.request_id], output) for output in step_outputs]
            self._on_step(outputs, self._core.stats())

    def _add(self, request: EngineRequest, owner: Owner) -> list[tuple[Owner, RequestOutput]]:
        """Add a request to the core; return the error output if the core rejects it."""
        try:
            self._core.add(request)
        except Exception as error:
            failed = RequestOutput(request.request_id, [], error=error_of_request(error))
            return [(owner, failed)]
        self._owners[request.request_id] = owner
        return []
