"""State of a request: what it takes from the two logs, and the clock of its client."""

import re

import msgspec
import numpy as np
import pytest

from shared.errors import PagemillError
from shared.protocol.chunks import ChunkSpec
from shared.protocol.records import AnyRecord, AudioChunk, CodeChunk
from tests.generator import voices
from workers.generator.core.schedule import Window
from workers.generator.core.speech import Playback, Speech
from workers.generator.core.vocoder import Vocoder
from workers.generator.loader import load_vocoder

SPEC = ChunkSpec(first=(3,), size=4)
FRAME = voices.SAMPLES_PER_FRAME


@pytest.fixture(scope="module")
def vocoder(tmp_path_factory: pytest.TempPathFactory) -> Vocoder:
    folder = tmp_path_factory.mktemp("voice")
    voices.write(folder)
    return load_vocoder(folder, SPEC, "a.stage")


def codes(position: int, *frames: int) -> CodeChunk:
    return CodeChunk(0, 1, position, [[code] for code in frames])


def audio(first_frame: int, num_frames: int, sample_rate: int = 24_000) -> AudioChunk:
    return AudioChunk(0, 1, first_frame * FRAME, num_frames * FRAME, sample_rate, "")


def test_a_chunk_waits_for_its_frames_and_their_context(vocoder: Vocoder) -> None:
    speech = Speech(SPEC, vocoder, [])
    speech.add(codes(0, 1, 2, 3, 4))
    assert speech.next_window() is None
    speech.add(codes(4, 5))
    assert speech.next_window() == Window(0, 0, 3, 5)
    speech.num_samples = 3 * FRAME
    assert speech.next_window() is None
    speech.is_complete = True
    assert speech.next_window() == Window(1, 3, 5, 5)
    np.testing.assert_array_equal(speech.codes[:, 0], [1, 2, 3, 4, 5])


def test_an_attempt_begins_after_the_samples_in_the_log(vocoder: Vocoder) -> None:
    log: list[AnyRecord] = [audio(0, 3), audio(3, 4)]
    speech = Speech(SPEC, vocoder, log)
    speech.add(codes(0, *range(13)))
    assert speech.num_samples == 7 * FRAME
    assert speech.next_window() == Window(5, 7, 11, 13)


def test_the_last_frame_of_a_speech_may_be_shorter(
    vocoder: Vocoder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[AnyRecord] = [audio(0, 3), AudioChunk(1, 1, 3 * FRAME, FRAME - 7, 24_000, "")]
    with pytest.raises(PagemillError, match="another vocoder"):
        Speech(SPEC, vocoder, log)
    monkeypatch.setattr(vocoder, "num_missing", 7)
    speech = Speech(SPEC, vocoder, log)
    speech.add(codes(0, 1, 2, 3, 4))
    speech.is_complete = True
    assert speech.next_window() is None


@pytest.mark.parametrize(
    ("chunk", "message"),
    [
        (codes(1, 3), "frame 0 is missing: the next record begins at frame 1"),
        (codes(0, 3, voices.NUM_CODES), "frame 1 has codes outside of 0 to 39"),
        (codes(0, -1), "frame 0 has codes outside of 0 to 39"),
        (CodeChunk(0, 1, 0, [[1], [1, 2]]), "frame 1 has 2 codes, but the vocoder needs 1"),
    ],
)
def test_frames_that_the_vocoder_cannot_take_are_refused(
    vocoder: Vocoder, chunk: CodeChunk, message: str
) -> None:
    speech = Speech(SPEC, vocoder, [])
    with pytest.raises(PagemillError, match=re.escape(message)):
        speech.add(chunk)
    assert len(speech.codes) == 0


@pytest.mark.parametrize(
    "chunk", [audio(0, 3, sample_rate=16_000), AudioChunk(0, 1, 0, FRAME + 1, 24_000, "")]
)
def test_the_sound_of_another_vocoder_is_not_continued(vocoder: Vocoder, chunk: AudioChunk) -> None:
    with pytest.raises(PagemillError, match="this sound was begun by another vocoder"):
        Speech(SPEC, vocoder, [chunk])


def test_a_record_without_frames_changes_nothing(vocoder: Vocoder) -> None:
    speech = Speech(SPEC, vocoder, [])
    speech.add(codes(0))
    assert len(speech.codes) == 0


def test_a_client_is_dry_when_it_has_played_what_it_got() -> None:
    playback = Playback(now_s=10.0)
    assert playback.dry_at_s == 10.0
    assert playback.add(0.5, now_s=12.0) == 0.0, "the wait for the first samples is no gap"
    assert playback.dry_at_s == 12.5
    assert playback.add(1.0, now_s=12.25) == 0.0
    assert playback.dry_at_s == 13.5
    assert playback.add(1.0, now_s=14.0) == 0.5
    assert playback.dry_at_s == 15.0


def test_the_text_of_a_chunk_lies_between_the_texts_of_its_records(vocoder: Vocoder) -> None:
    speech = Speech(SPEC, vocoder, [])
    speech.add(codes(0, 1, 2))
    assert speech.end_token_at(2) is None
    speech.add(msgspec.structs.replace(codes(2, 1, 2), end_token=2))
    speech.add(msgspec.structs.replace(codes(4, *range(8)), end_token=3))
    speech.add(msgspec.structs.replace(codes(12, 1), end_token=3))
    assert [speech.end_token_at(n) for n in (0, 1, 2, 4, 11, 12, 13, 50)] == [
        0,
        0,
        1,
        2,
        2,
        3,
        3,
        3,
    ]
