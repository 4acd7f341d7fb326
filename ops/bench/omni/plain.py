"""A plain loop that speaks: talker and vocoder in one process, without a queue or a log between.

It is the lower bound of the durable transport: the same weights, kernels, batches of the talker and
chunks.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ops.bench.omni.figures import Spoken
from shared.config.schema import Config, ModelConfig
from shared.protocol.records import CodeChunk
from shared.stage.pipelines import pipelines_of
from workers.engine.code_output import CodeOutput, stage_output
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import EngineRequest, RequestOutput
from workers.engine.loader import load
from workers.engine.main import build_core
from workers.generator.core.speech import Speech
from workers.generator.core.vocoder import cut
from workers.generator.loader import load_vocoder


@dataclass(slots=True)
class _Open:
    """A speech that is being made."""

    speech: Speech
    began_s: float
    first_s: float | None = None
    sound: bytearray = field(default_factory=bytearray)


class PlainLoop:
    """Speaks texts, several at once."""

    def __init__(self, config: Config, model: str, talker: str, vocoder: str) -> None:
        pipeline = pipelines_of(config)[model]
        stage, generator = pipeline.stage(talker), pipeline.stage(vocoder)
        assert stage is not None
        assert stage.path is not None
        assert generator is not None
        assert generator.path is not None
        assert generator.chunks is not None
        own = ModelConfig(stage.path, dtype=config.models[model].dtype)
        loaded = load(own, config.engine, speaks=True)
        no_bus: Any = None
        output = stage_output(no_bus, stage, loaded, talker)
        assert isinstance(output, CodeOutput)
        self._core: EngineCore = build_core(loaded, config.engine)
        self._output = output
        self._chunks = generator.chunks
        self._vocoder = load_vocoder(Path(generator.path), generator.chunks, vocoder)
        self._voice = next(iter(output.voices.values()))

    def speak(self, texts: Sequence[str], at_once: int) -> list[Spoken]:
        """Speak all texts, `at_once` of them at a time; the next begins when one has ended."""
        waiting = list(enumerate(texts))[::-1]
        opened: dict[str, _Open] = {}
        spoken: list[Spoken] = []
        while waiting or opened:
            while waiting and len(opened) < at_once:
                self._begin(*waiting.pop(), opened)
            for output in self._core.step():
                speaking = opened[output.request_id]
                self._add(speaking, output)
                if output.usage is not None:
                    del opened[output.request_id]
                    spoken.append(self._ended(speaking))
        return spoken

    def _begin(self, number: int, text: str, opened: dict[str, _Open]) -> None:
        prompt = [*self._output.encode(text), self._voice]
        self._core.add(EngineRequest(str(number), prompt, [], self._output.sampling))
        opened[str(number)] = _Open(Speech(self._chunks, self._vocoder, []), time.perf_counter())

    def _add(self, speaking: _Open, output: RequestOutput) -> None:
        speech, codes = speaking.speech, self._output.codes
        frames = codes.frames_of([t for delta in output.choices for t in delta.token_ids])
        speech.add(CodeChunk(0, 1, len(speech.codes), frames))
        speech.is_complete = output.usage is not None
        while (window := speech.next_window()) is not None:
            (samples,) = self._vocoder.synthesize([cut(self._vocoder, speech.codes, window)])
            speaking.sound += samples.astype("<i2").tobytes()
            speech.num_samples += len(samples)
            speaking.first_s = speaking.first_s or time.perf_counter() - speaking.began_s

    def _ended(self, speaking: _Open) -> Spoken:
        sound_s = speaking.speech.num_samples / self._vocoder.sample_rate
        took_s = time.perf_counter() - speaking.began_s
        return Spoken(speaking.first_s or took_s, took_s, sound_s, bytes(speaking.sound))
