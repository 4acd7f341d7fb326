"""Sequences that wait for input: talkers whose texts come bit by bit."""

import random
from dataclasses import dataclass, replace

from shared.protocol.sampling import SamplingParams
from tests.engine.core.test_engine import EOS, VOCAB_SIZE, make_core
from tests.fakes import FakeLaunched, FakeRunner
from workers.engine.core.engine import EngineCore
from workers.engine.core.sequence import (
    Batch,
    EngineRequest,
    LoggedChoice,
    RequestOutput,
    Sequence,
    SpokenText,
)

MAX_FRAMES = 10


class ReadingRunner(FakeRunner):
    """The row of a prompt's last token, and of each frame, has a further token of the text."""

    def launch(self, batch: Batch) -> FakeLaunched:
        for s in batch.scheduled:
            speech, stop = s.sequence.speech, s.end
            assert speech is not None
            num_read = stop - s.sequence.num_prompt_tokens + 1
            # The last token of what is known may be the end, which is not spoken.
            assert speech.num_inputs is None or num_read < max(1, len(speech.answer_token_ids))
        return super().launch(batch)

    def next_token(self, sequence: Sequence, appended: object = ()) -> int:
        assert sequence.speech is not None
        num_read = sequence.num_tokens - sequence.num_prompt_tokens + 1
        read = sequence.speech.answer_token_ids[:-1][:num_read]
        return random.Random(repr((sequence.token_ids, read))).randrange(VOCAB_SIZE)


@dataclass
class Speech:
    request: EngineRequest
    text: list[int]
    num_known: int
    frames: list[int]

    def spoken_text(self) -> SpokenText:
        num_inputs = len(self.request.prompt_token_ids) - 1 + max(0, self.num_known - 1)
        is_whole = self.num_known == len(self.text)
        return SpokenText([], self.text[: self.num_known], None, None if is_whole else num_inputs)

    @property
    def expected_frames(self) -> list[int]:
        """Frames of a plain loop over the whole text."""
        spoken = replace(self.request, speech=SpokenText([], self.text, None), logged=[])
        sequence = Sequence(spoken, 0, 0, [*spoken.prompt_token_ids], MAX_FRAMES)
        sequence.speech = spoken.speech
        runner = ReadingRunner(2, VOCAB_SIZE)
        while sequence.num_output_tokens < MAX_FRAMES:
            sequence.token_ids.append(runner.next_token(sequence))
            if sequence.token_ids[-1] == EOS:
                break
        return sequence.token_ids[sequence.num_prompt_tokens :]


def make_speech(rng: random.Random, name: str, num_known: int = 0) -> Speech:
    text = [rng.randrange(100) for _ in range(rng.randint(1, 12))]
    sampling = SamplingParams(max_tokens=MAX_FRAMES, temperature=0.0)
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(2, 10))]
    speech = Speech(EngineRequest(name, prompt, [], sampling), text, num_known, [])
    lane = rng.choice(["interactive", "batch"])
    speech.request = replace(speech.request, lane=lane, speech=speech.spoken_text())
    return speech


def collect(outputs: list[RequestOutput], speeches: dict[str, Speech]) -> None:
    for output in outputs:
        assert output.error is None
        frames = speeches[output.request_id].frames
        for delta in output.choices:
            assert delta.position == len(frames)
            frames += delta.token_ids


def step(core: EngineCore, speeches: dict[str, Speech]) -> None:
    """A step either does something, or leaves nothing that a step could do."""
    before = core.stats()
    outputs = core.step()
    collect(outputs, speeches)
    stats = core.stats()
    is_idle = (stats.num_steps, stats.num_preemptions) == (before.num_steps, before.num_preemptions)
    if is_idle and stats.num_running == before.num_running:
        assert not core.has_work


def test_a_speech_depends_on_its_text_alone_however_it_comes() -> None:
    """Also under preemption, after cancellations, and after frames that are in the log."""
    num_waits = num_preemptions = num_cached = 0
    for seed in range(40):
        rng = random.Random(seed)
        core = make_core(
            ReadingRunner(2, VOCAB_SIZE),
            num_blocks=12,
            max_num_seqs=rng.randint(2, 6),
            max_num_batched_tokens=rng.randint(1, 12),
        )
        speeches = {name: make_speech(rng, name) for name in "abcdef"}
        waiting, running, cancelled = [*speeches], list[str](), set[str]()
        while waiting or running:
            action = rng.random()
            if waiting and action < 0.2:
                core.add(speeches[waiting[0]].request)
                running.append(waiting.pop(0))
            elif running and action < 0.45:
                speech = speeches[rng.choice(running)]
                speech.num_known = min(speech.num_known + rng.randint(1, 3), len(speech.text))
                core.extend_speech(speech.request.request_id, speech.spoken_text())
            elif running and action < 0.49:
                # As after a death: another attempt begins with the log, and reads the text again.
                speech = speeches[rng.choice(running)]
                core.cancel(speech.request.request_id)
                del speech.frames[rng.randint(0, len(speech.frames)) :]
                speech.num_known = 0
                logged = [LoggedChoice([*speech.frames], False)]
                core.add(replace(speech.request, logged=logged))
            elif running and action < 0.5:
                cancelled.add(name := rng.choice(running))
                core.cancel(name)
            elif core.has_work:
                step(core, speeches)
                num_waits += core.stats().num_without_input > 0 and not core.has_work
            running = [name for name in running if name in core._requests]
        stats = core.stats()
        assert not core.has_work
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        num_preemptions += stats.num_preemptions
        num_cached += stats.prefix_hit_tokens
        for name in speeches.keys() - cancelled:
            assert speeches[name].frames == speeches[name].expected_frames
    assert min(num_waits, num_preemptions, num_cached) > 20


def test_a_sequence_without_input_keeps_its_blocks_and_others_continue() -> None:
    rng = random.Random(1)
    core = make_core(ReadingRunner(2, VOCAB_SIZE))
    silent = make_speech(rng, "silent")
    speeches = {"silent": silent}
    core.add(silent.request)
    step(core, speeches)
    stats = core.stats()
    assert (stats.num_running, stats.num_without_input, stats.num_waiting) == (1, 1, 0)
    assert not core.has_work
    assert stats.num_free_blocks < stats.num_blocks
    other = make_speech(rng, "other", num_known=99)
    other.request = replace(other.request, speech=SpokenText([], other.text, None))
    speeches["other"] = other
    core.add(other.request)
    while core.has_work:
        step(core, speeches)
    assert other.frames == other.expected_frames
    assert core.stats().num_without_input == 1
    silent.num_known = len(silent.text)
    core.extend_speech("silent", silent.spoken_text())
    while core.has_work:
        step(core, speeches)
    assert silent.frames == silent.expected_frames


def test_one_of_a_better_priority_gets_the_place_of_one_without_input() -> None:
    rng = random.Random(3)
    core = make_core(ReadingRunner(2, VOCAB_SIZE), num_blocks=12, max_num_seqs=2)
    speeches = {name: make_speech(rng, name) for name in ("batch1", "batch2", "urgent", "later")}
    for name in ("batch1", "batch2"):
        core.add(replace(speeches[name].request, lane="batch"))
    step(core, speeches)
    for name in ("urgent", "later"):
        core.add(replace(speeches[name].request, lane="interactive"))
    step(core, speeches)
    assert core.stats().num_preemptions == 2
    running = {sequence.request_id for sequence in core._scheduler.running}
    assert running == {"urgent", "later"}
    while core.has_work:
        step(core, speeches)
    assert core.stats().num_preemptions == 2, "those behind them wait"
    for name, speech in speeches.items():
        speech.num_known = len(speech.text)
        core.extend_speech(name, speech.spoken_text())
    while core.has_work:
        step(core, speeches)
    assert all(speech.frames == speech.expected_frames for speech in speeches.values())


def test_no_step_is_tried_while_all_wait_for_one_without_input() -> None:
    core = make_core(ReadingRunner(2, VOCAB_SIZE), max_num_seqs=1)
    rng = random.Random(2)
    speeches = {name: make_speech(rng, name) for name in ("first", "second")}
    for speech in speeches.values():
        core.add(replace(speech.request, lane="interactive"))
    for _ in range(2):
        step(core, speeches)
    assert core.stats().num_waiting == 1
    assert not core.has_work
    core.cancel("first")
    assert core.has_work
