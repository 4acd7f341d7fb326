"""Bugs of the outputs other than the text: their writers, their ends, and records after them."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

from ops.chaos.bugs.registry import bug
from ops.chaos.patching import replace_attribute, skip, wrap


@bug("code2wav", "speeches", "I3")
def context_one_frame_short() -> None:
    from shared.protocol.chunks import ChunkSpec
    from workers.generator.core import speech
    from workers.generator.core.schedule import Window, window_at

    def short(spec: ChunkSpec, start: int, num_frames: int, *, is_complete: bool) -> Window | None:
        window = window_at(spec, start, num_frames, is_complete=is_complete)
        if window is None or window.start - window.first < spec.left:
            return window
        return window._replace(first=window.first + 1)

    replace_attribute(speech, "window_at", short)


@bug("code2wav", "speeches", "I2")
def samples_appended_twice() -> None:
    from shared.state.token_log import LogWriter

    @wrap(LogWriter, "audio")
    async def twice(audio: Any, self: LogWriter, *args: Any) -> None:
        await audio(self, *args)
        await audio(self, *args)


@bug("code2wav", "speeches", "I3")
def codes_of_another_request() -> None:
    """A vocoder follows the codes of the previous request."""
    from shared.bus.bus import Bus
    from shared.protocol.records import CodeChunk
    from shared.protocol.task_messages import TaskHeader
    from shared.stage.inputs import follow_codes
    from workers.generator import speech_worker

    before: list[TaskHeader] = []

    def follow_other(bus: Bus, header: TaskHeader, output: str) -> AsyncGenerator[CodeChunk, None]:
        before.append(header)
        return follow_codes(bus, before[-2] if len(before) % 4 == 0 else header, output)

    replace_attribute(speech_worker, "follow_codes", follow_other)


@bug("code2wav", "dying in speeches", "I2")
def sound_begun_again_on_resume() -> None:
    from shared.protocol.chunks import ChunkSpec
    from shared.protocol.records import AnyRecord
    from workers.generator.core.speech import Speech
    from workers.generator.core.vocoder import Vocoder

    @wrap(Speech, "__init__")
    def forgetful(
        begin: Any, self: Speech, spec: ChunkSpec, vocoder: Vocoder, records: list[AnyRecord]
    ) -> None:
        begin(self, spec, vocoder, [])


@bug("talker", "dying in speeches", "I2", "I3")
def frame_lost_on_resume() -> None:
    from shared.protocol.records import AnyRecord
    from workers.engine.code_output import CodeOutput
    from workers.engine.core.sequence import LoggedChoice

    @wrap(CodeOutput, "logged")
    def without_last(
        logged: Any, self: CodeOutput, records: Sequence[AnyRecord], n: int
    ) -> list[LoggedChoice]:
        return [LoggedChoice(choice.token_ids[:-1], False) for choice in logged(self, records, n)]


@bug("talker", "speeches", "I1", "I10", "I16")
def end_of_codes_lost() -> None:
    from shared.state.token_log import LogWriter

    skip(LogWriter, "end")


@bug("any", "speeches", "I1", "I10", "I16")
def ends_listed_without_fence() -> None:
    """Two outputs that end at about the same time each write a list without the other."""
    from shared.bus.bus import Bus
    from shared.protocol import subjects
    from shared.protocol.encoding import to_json
    from shared.protocol.pipeline import ENDS
    from shared.protocol.records import OutputEnds
    from shared.state import output_ends

    async def change(
        bus: Bus, request_id: str, change: Callable[[OutputEnds | None], OutputEnds]
    ) -> OutputEnds:
        ends, _ = await output_ends._read(bus, request_id)
        changed = change(ends)
        await asyncio.sleep(0.3)
        await bus.publish_without_id(subjects.append(request_id, ENDS), to_json(changed))
        return changed

    replace_attribute(output_ends, "_change", change)


@bug("coordinator", "frozen vocoders", "I16")
def outputs_left_open_at_cancel() -> None:
    """A vocoder that was frozen at the cancellation writes after the end of the request."""
    from shared.bus.bus import Bus
    from shared.state import output_ends

    async def none_expected(bus: Bus, request_id: str) -> list[str]:
        return []

    replace_attribute(output_ends, "expected", none_expected)


@bug("gateway", "speeches", "I2", "I3")
def piece_of_sound_sent_twice() -> None:
    from shared.protocol.records import AnyRecord
    from workers.gateway.backend import sound
    from workers.gateway.backend.active_request import ActiveRequest

    encoded = sound._encoded

    async def stammer(
        active: ActiveRequest, logs: Sequence[AsyncGenerator[AnyRecord, None]], form: str
    ) -> AsyncGenerator[bytes, None]:
        number = 0
        async for piece in encoded(active, logs, form):
            number += 1
            yield piece
            if number == 2:
                yield piece

    replacement: Any = stammer
    replace_attribute(sound, "_encoded", replacement)
