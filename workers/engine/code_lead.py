"""Back-pressure on talkers: how far their codes are ahead of the stages that follow.

A speech that is too far ahead gives up its place and its KV blocks. Its task goes back to the
queue, and the engine that claims it waits, without a sequence, until the stages behind have caught
up. The speech goes on behind what is in its log, as after a death.
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
from workers.engine.core.sequence import RequestOutput
from workers.engine.open_request import NotBegun
from workers.engine.stage_output import Progress

POLL_S = 0.5
CROWDED_PAUSE_S = 1.0
"""Average pause of a speech that waits where others do already. The stages behind may be full of
speeches that wait for this engine, which have to find a place here."""


@dataclass(frozen=True, slots=True)
class CodeLead:
    """The frames of speeches that the stages behind have not made sound of."""

    _followers: Mapping[str, ChunkSpec] = field(default_factory=dict)
    """How the stages that follow cut the codes, by the names of their outputs."""

    async def is_too_long(self, bus: Bus, header: TaskHeader, last: RequestOutput) -> bool:
        """Whether the speech is too far ahead with the frames of a step, which are in its log."""
        num_frames = max((d.position + len(d.token_ids) for d in last.choices), default=0)
        return await self._exceeds(bus, header, num_frames)

    async def wait(
        self,
        bus: Bus,
        header: TaskHeader,
        records: Sequence[AnyRecord],
        progress: Progress,
        is_crowded: Callable[[], bool],
    ) -> None:
        """Wait until the speech may go on. `progress` is awaited meanwhile, and may end it.

        `records` are those of the log of its codes. Raises NotBegun when too many others wait in
        this engine: `is_crowded`.
        """
        if records and isinstance(last := records[-1], CodeChunk):
            while await self._exceeds(bus, header, last.position + len(last.frames)):
                await progress()
                if is_crowded():
                    raise NotBegun(Requeue(CROWDED_PAUSE_S * (0.5 + random.random())))
                await asyncio.sleep(POLL_S)

    async def _exceeds(self, bus: Bus, header: TaskHeader, num_frames: int) -> bool:
        for output, chunks in self._followers.items():
            # Without the output in the request, nobody follows.
            if num_frames <= chunks.max_ahead or output not in header.outputs:
                continue
            last = await last_of_output(bus, header.request_id, output)
            num_chunks = last.index + 1 if isinstance(last, AudioChunk) else 0
            has_ended = last is not None and not isinstance(last, AudioChunk)
            if not has_ended and num_frames - chunks.frames_of(num_chunks) > chunks.max_ahead:
                return True
        return False
