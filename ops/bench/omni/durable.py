"""Speeches through the queue: worker processes, an embedded broker, and a client."""

import asyncio
import base64
import time
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from ops.bench.omni.figures import Spoken
from ops.harness.deployment import Deployment
from ops.harness.machine import processor_s
from shared import client
from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.protocol import subjects
from shared.protocol.records import AudioChunk, CodeChunk, Finish
from shared.protocol.requests import GenerateRequest
from shared.state.log_records import decode_record
from workers.roles import WorkerSpec

MODEL, TALKER, VOCODER, CODES, AUDIO = "demo", "talker", "code2wav", "codes", "audio"
SPECS = [
    WorkerSpec("coordinator"),
    WorkerSpec("engine", MODEL, TALKER),
    WorkerSpec("generator", MODEL, VOCODER),
]
STEPS = ("talker begins", "codes of a chunk", "vocoder", "client")
"""The steps to the first samples, each named by its end."""


class _Heard(NamedTuple):
    """A speech, and the times at its client."""

    spoken: Spoken
    request_id: str
    finish: Finish
    began_ms: float
    first_ms: float


class Site:
    """A running cluster, and a connection to its broker."""

    def __init__(self, bus: Bus, deployment: Deployment, first_frames: int) -> None:
        """`first_frames` are the frames that the first chunk needs."""
        self._bus = bus
        self._deployment = deployment
        self._first_frames = first_frames

    async def speak(self, texts: Sequence[str], at_once: int) -> list[Spoken]:
        """Speak all texts, `at_once` of them at a time; the next begins when one has ended."""
        waiting = deque(texts)
        spoken: list[Spoken] = []

        async def speak_some() -> None:
            while waiting:
                spoken.append((await self._listen(waiting.popleft())).spoken)

        await asyncio.gather(*(speak_some() for _ in range(at_once)))
        return spoken

    async def steps_of(self, text: str) -> dict[str, float]:
        """Speak a text; return the milliseconds of each of STEPS."""
        speech = await self._listen(text)
        begun = {span.stage: span.received_ms for span in speech.finish.path}
        codes = await self._log_of(speech.request_id, CODES)
        audio = await self._log_of(speech.request_id, AUDIO)
        enough_ms, num_frames = codes[-1].stored_ms, 0
        for message in codes:
            record = decode_record(message.data)
            if isinstance(record, CodeChunk):
                num_frames += len(record.frames)
            if num_frames >= self._first_frames:
                enough_ms = message.stored_ms
                break
        times = [speech.began_ms, begun[TALKER], enough_ms]
        times += [audio[0].stored_ms, speech.first_ms]
        return {name: times[n + 1] - times[n] for n, name in enumerate(STEPS)}

    async def _log_of(self, request_id: str, output: str) -> list[StoredMessage]:
        return await self._bus.read(subjects.TOKENS_STREAM, subjects.tokens(request_id, output))

    async def _listen(self, text: str) -> "_Heard":
        request_id, began_s, began_ms = client.new_request_id(), now_s(), self._bus.now_ms()
        request = GenerateRequest(MODEL, given_text=text, outputs=[AUDIO], timeout_s=60.0)
        finishing = asyncio.create_task(self._finish(request, request_id))
        first_s, first_ms, sound, rate = 0.0, 0.0, bytearray(), 1
        async for record in client.follow_output(self._bus, request_id, AUDIO):
            if isinstance(record, AudioChunk):
                first_s, first_ms = first_s or now_s() - began_s, first_ms or self._bus.now_ms()
                sound += base64.b64decode(record.pcm)
                rate = record.sample_rate
        took_s = now_s() - began_s
        finish = await finishing
        spoken = Spoken(first_s or took_s, took_s, len(sound) / 2 / rate, bytes(sound))
        return _Heard(spoken, request_id, finish, began_ms, first_ms)

    async def _finish(self, request: GenerateRequest, request_id: str) -> Finish:
        last = [record async for record in client.ask(self._bus, request, request_id)][-1]
        if not isinstance(last, Finish):
            raise SystemExit(f"a speech has failed: {last}")
        return last

    def processor_s(self) -> dict[str, float]:
        """Processor time of each part so far."""
        return processor_s(self._deployment.processes()) | {"client": time.process_time()}

    async def delay_of_kill(self, text: str) -> float:
        """Return the seconds by which a kill of the talker delays the last sample of a speech.

        The samples must be the same.
        """
        (undisturbed,) = await self.speak([text], 1)
        speaking = asyncio.create_task(self.speak([text], 1))
        await asyncio.sleep(undisturbed.first_s)
        self._deployment.kill("engine", TALKER)
        (killed,) = await speaking
        if killed.sound != undisturbed.sound:
            raise SystemExit("after the kill of its talker, the speech has other samples")
        return killed.last_s - undisturbed.last_s


now_s = time.perf_counter
