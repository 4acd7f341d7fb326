"""State of a request in the engine, from the claim of its task to the last record of its log."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator
from contextlib import aclosing, contextmanager

from shared.protocol.task_messages import TaskHeader
from shared.stage.inputs import RequestEnded
from shared.stage.job import Job
from shared.stage.worker_loop import Outcome
from workers.engine.core.sequence import RequestOutput, SpokenText
from workers.engine.log_records import num_for_record
from workers.engine.metrics import RequestTiming
from workers.engine.record_rate import RecordRate
from workers.engine.stage_output import Rendered

BATCH_RECORD_S = 1.0
"""Shortest time between two records of a request in the batch lane, which no person reads along."""


class OpenRequest:
    """Outputs of one request on their way to its log."""

    def __init__(
        self,
        job: Job,
        header: TaskHeader,
        timing: RequestTiming,
        rendered: Rendered,
        record_tokens: int = 1,
    ) -> None:
        """For `record_tokens` see `StageOutput`."""
        self._record_tokens = record_tokens
        self.job = job
        self.header = header
        self.timing = timing
        self.rendered = rendered
        self.pending: list[RequestOutput] = []
        """Outputs that are not in the log yet."""
        self.begun = False
        """Whether there has been an output."""
        self.ended = False
        """Whether the request was ended elsewhere, so that no further record may be written."""
        self.next_release_s = 0.0
        """Time of the loop before which a `RecordPacer` releases nothing."""
        self.error: Exception | None = None
        """Error of reading the text that the request speaks."""
        self._changed = asyncio.Event()
        self._reading: asyncio.Task[None] | None = None

    def push(self, output: RequestOutput, *, awaited: bool = False) -> None:
        """Add an output of a step. Awaited and final outputs are logged at once."""
        self.pending.append(output)
        self.begun = True
        if awaited or output.usage is not None or output.error is not None:
            self.release()

    def release(self) -> None:
        """Release the pending outputs to the log."""
        self._changed.set()

    def end(self) -> None:
        self.ended = True
        self._changed.set()

    def start_reading(self, extend: Callable[[str, SpokenText], None]) -> None:
        """Call `extend` with the text that the request speaks, whenever more of it has arrived."""
        growth = self.rendered.growth
        if growth is not None:
            self._reading = asyncio.create_task(self._read(growth, extend))

    def stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()

    async def _read(
        self, growth: AsyncGenerator[SpokenText], extend: Callable[[str, SpokenText], None]
    ) -> None:
        try:
            async with aclosing(growth):
                async for speech in growth:
                    extend(self.header.request_id, speech)
        except RequestEnded:
            self.end()
        except Exception as error:
            self.error = error
            self._changed.set()

    async def next_outputs(self) -> list[RequestOutput]:
        """Wait for released outputs, and return the outputs of one record, or none once `ended`.

        Raises `error`.
        """
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self.ended:
                return []
            if self.error is not None:
                raise self.error
            num_outputs = num_for_record(self.pending, self._record_tokens)
            outputs, self.pending = self.pending[:num_outputs], self.pending[num_outputs:]
            if outputs and self.pending:
                self._changed.set()
            if outputs:
                return outputs


class NotBegun(Exception):
    """Raised if a request ends elsewhere, or this worker stops, before the request begins here."""

    def __init__(self, outcome: Outcome) -> None:
        self.outcome = outcome


class RecordPacer:
    """Releases the outputs of all requests to their logs together, at the rate of a `RecordRate`.

    The more requests there are, the more tokens of each share a record. Requests of the batch lane
    have records in longer intervals, and together at most half of the rate, so that their number
    does not make the streams of interactive requests coarser.
    """

    def __init__(
        self,
        rate: RecordRate,
        appends_of_request_per_s: float,
        requests: Callable[[], Iterable[OpenRequest]],
    ) -> None:
        self._rate = rate
        self._appends_of_request_per_s = appends_of_request_per_s
        self._requests = requests
        self._batch_record_s = BATCH_RECORD_S
        self._released_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Measure the time of a block that appends a record."""
        loop = asyncio.get_running_loop()
        self._rate.begin(loop.time())
        try:
            yield
        finally:
            self._rate.end(loop.time())

    def release_in_time(self) -> None:
        """Release now, or as soon as the rate allows it."""
        loop = asyncio.get_running_loop()
        lanes = Counter(request.header.lane for request in self._requests())
        num_batch, num_interactive = lanes["batch"], lanes["interactive"]
        appends_per_s = self._rate.per_s
        self._batch_record_s = max(BATCH_RECORD_S, 2 * num_batch / appends_per_s)
        left_per_s = appends_per_s - num_batch / self._batch_record_s
        period_s = max(num_interactive / left_per_s, 1 / self._appends_of_request_per_s)
        wait_s = self._released_s + period_s - loop.time()
        if wait_s <= 0:
            self._release()
        elif self._timer is None:
            self._timer = loop.call_later(wait_s, self._release)

    def _release(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._released_s = now_s = asyncio.get_running_loop().time()
        for request in self._requests():
            if request.pending and now_s >= request.next_release_s:
                request.release()
                if request.header.lane == "batch":
                    request.next_release_s = now_s + self._batch_record_s
