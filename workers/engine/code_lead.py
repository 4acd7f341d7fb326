"""Back-pressure on talkers: limits the lead of a speech's codes over the stages that follow.

A speech that is too far ahead gives up its place and its KV blocks. Its task goes back to the
queue, and the engine that claims it waits, without a sequence, until the following stages have
caught up. The speech then continues after the last frame in its log, as after a worker's death.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from shared.bus.bus import Bus
from shared.protocol.chunks import ChunkSpec
from shared.protocol.records import AnyRecord, AudioChunk, CodeChunk
from shared.protocol.task_messages import TaskHeader
from shared.stage.worker_loop import Requeue
from shared.state.token_log import last_of_output
from workers.engine.open_request import NotBegun
from workers.engine.stage_output import Progress

POLL_S = 0.5
CROWDED_PAUSE_S = 1.0
"""Average pause of a speech while too many other speeches wait in its engine. The following stages
may be full of speeches that wait for this engine, so these must find a place here."""


@dataclass(frozen=True, slots=True)
class CodeLead:
    """Limit on the frames of a speech that the following stages have not turned into sound."""

    _followers: Mapping[str, ChunkSpec] = field(default_factory=dict)
    """Output of each following stage, and the chunks in which the stage reads the codes."""

    async def is_too_long(self, bus: Bus, header: TaskHeader, num_frames: int) -> bool:
        """Whether the speech is too far ahead with this number of frames in its log."""
        return await self._exceeds(bus, header, num_frames)

    async def wait(
        self,
        bus: Bus,
        header: TaskHeader,
        records: Sequence[AnyRecord],
        progress: Progress,
        is_crowded: Callable[[], bool],
    ) -> None:
        """Wait until the speech may continue; `progress` is awaited repeatedly and may end it.

        `records` is the log of its codes. Raises NotBegun when `is_crowded` returns true, because
        too many other speeches wait in this engine.
        """
        if records and isinstance(last := records[-1], CodeChunk):
            while await self._exceeds(bus, header, last.position + len(last.frames)):
                await progress()
                if is_crowded():
                    raise NotBegun(Requeue(CROWDED_PAUSE_S * (0.5 + random.random())))
                await asyncio.sleep(POLL_S)

    async def _exceeds(self, bus: Bus, header: TaskHeader, num_frames: int) -> bool:
        for output, chunks in self._followers.items():
            # No stage follows if the request does not have the output.
            if num_frames <= chunks.max_ahead or output not in header.outputs:
                continue
            last = await last_of_output(bus, header.request_id, output)
            num_chunks = last.index + 1 if isinstance(last, AudioChunk) else 0
            has_ended = last is not None and not isinstance(last, AudioChunk)
            if not has_ended and num_frames - chunks.frames_of(num_chunks) > chunks.max_ahead:
                return True
        return False
