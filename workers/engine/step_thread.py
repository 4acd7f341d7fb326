"""The thread that computes: requests and cancellations go in, the outputs of each step come out.

Between it and asyncio there are only queues of plain objects; neither side waits for the other.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from shared.errors import PagemillError, WorkerFailure
from workers.engine.core.engine import EngineCore, EngineStats
from workers.engine.core.sequence import EngineRequest, RequestOutput

LAST_STEP_S = 1.0

Owner = TypeVar("Owner")


class StepThread(Generic[Owner]):
    """Owns the core: nobody else touches it after the start.

    Every output goes to the owner that its request came with. The name of the request would not do:
    outputs of an earlier owner of that name may still be on their way when a later one begins.
    """

    def __init__(
        self,
        core: EngineCore,
        on_step: Callable[[list[tuple[Owner, RequestOutput]], EngineStats], object],
        on_crash: Callable[[Exception], object],
    ) -> None:
        self._core = core
        self._on_step = on_step
        self._on_crash = on_crash
        self._owners: dict[str, Owner] = {}
        self._commands: queue.SimpleQueue[tuple[EngineRequest, Owner] | str | None]
        self._commands = queue.SimpleQueue()
        self._step_began_s: float | None = None
        self.began_s = 0.0
        """When the last step began, on the monotonic clock; for `on_step`."""
        self._thread = threading.Thread(target=self._run, name="steps", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, request: EngineRequest, owner: Owner) -> None:
        self._commands.put((request, owner))

    def cancel(self, request_id: str) -> None:
        """Its blocks are free before the next step begins."""
        self._commands.put(request_id)

    def stop(self) -> None:
        """The thread ends after the step that it is in; one that hangs is left behind."""
        self._commands.put(None)
        self._thread.join(LAST_STEP_S)

    @property
    def step_s(self) -> float:
        """For how long the step has been going on; 0 between steps."""
        began_s = self._step_began_s
        return 0.0 if began_s is None else time.monotonic() - began_s

    def _run(self) -> None:
        try:
            self._step_until_stopped()
        except Exception as error:
            self._on_crash(error)

    def _step_until_stopped(self) -> None:
        while True:
            told: list[tuple[Owner, RequestOutput]] = []
            # An idle loop sleeps on the queue; a busy one looks into it between steps.
            while not self._commands.empty() or not (self._core.has_work or told):
                command = self._commands.get()
                if command is None:
                    return
                if isinstance(command, str):
                    self._core.cancel(command)
                    self._owners.pop(command, None)
                    if not self._core.has_work:
                        self._on_step([], self._core.stats())
                else:
                    told += self._add(*command)
            self._step_began_s = self.began_s = time.monotonic()
            outputs = self._core.step()
            self._step_began_s = None
            told += [(self._owners[output.request_id], output) for output in outputs]
            self._on_step(told, self._core.stats())

    def _add(self, request: EngineRequest, owner: Owner) -> list[tuple[Owner, RequestOutput]]:
        """What there is to tell at once: that the core refuses it."""
        try:
            self._core.add(request)
        except PagemillError as error:
            return [(owner, RequestOutput(request.request_id, [], error=error))]
        except Exception as error:
            failure = WorkerFailure("the engine failed on this request")
            failure.__cause__ = error
            return [(owner, RequestOutput(request.request_id, [], error=failure))]
        self._owners[request.request_id] = owner
        return []
