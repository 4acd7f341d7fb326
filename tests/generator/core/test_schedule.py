"""The schedule of chunks depends on positions, and not on the order in which frames arrive."""

from collections.abc import Iterator

from hypothesis import given
from hypothesis import strategies as st

from shared.protocol.chunks import ChunkSpec
from workers.generator.core.schedule import Window, end_of, window_at

SPECS = st.builds(
    ChunkSpec,
    first=st.lists(st.integers(1, 9), max_size=3).map(tuple),
    size=st.integers(1, 12),
    left=st.integers(0, 5),
    right=st.integers(0, 5),
)


def windows(spec: ChunkSpec, num_frames: int, start: int = 0) -> Iterator[Window]:
    """The windows of a complete speech from frame `start` on."""
    while (window := window_at(spec, start, num_frames, is_complete=True)) is not None:
        yield window
        start = window.end


@given(SPECS, st.integers(0, 60))
def test_the_first_chunks_have_the_frames_of_their_windows(
    spec: ChunkSpec, num_chunks: int
) -> None:
    cut = [*windows(spec, 1000)][:num_chunks]
    assert spec.frames_of(len(cut)) == (cut[-1].end if cut else 0) or cut[-1].end == 1000


@given(SPECS, st.integers(0, 200))
def test_a_chunk_can_be_computed_whenever_the_frames_are_as_far_ahead_as_they_must_be(
    spec: ChunkSpec, start: int
) -> None:
    begin = end_of(spec, start)
    assert window_at(spec, begin, begin + spec.min_ahead, is_complete=False) is not None


def test_the_first_chunks_are_small() -> None:
    spec = ChunkSpec(first=(5, 10), size=25, left=2, right=3)
    assert list(windows(spec, 70)) == [
        Window(0, 0, 5, 8),
        Window(3, 5, 15, 18),
        Window(13, 15, 40, 43),
        Window(38, 40, 65, 68),
        Window(63, 65, 70, 70),
    ]
    assert [window.shape for window in windows(spec, 70)] == [
        (0, 5, 3),
        (2, 10, 3),
        (2, 25, 3),
        (2, 25, 3),
        (2, 5, 0),
    ]


@given(SPECS, st.integers(0, 80))
def test_chunks_cover_a_speech_without_a_gap(spec: ChunkSpec, num_frames: int) -> None:
    chunks = list(windows(spec, num_frames))
    assert [frame for w in chunks for frame in range(w.start, w.end)] == list(range(num_frames))
    for window in chunks:
        assert window.first == max(0, window.start - spec.left)
        assert window.last == min(num_frames, window.end + spec.right)


@given(SPECS, st.integers(1, 80), st.data())
def test_a_window_is_the_same_whenever_its_frames_arrive(
    spec: ChunkSpec, num_frames: int, data: st.DataObject
) -> None:
    arrivals = data.draw(st.lists(st.integers(0, num_frames), max_size=12).map(sorted))
    chunks: list[Window] = []
    for num_there in arrivals:
        while (w := window_at(spec, _next(chunks), num_there, is_complete=False)) is not None:
            assert w.last <= num_there
            chunks.append(w)
    chunks += windows(spec, num_frames, _next(chunks))
    assert chunks == list(windows(spec, num_frames))


@given(SPECS, st.integers(1, 80), st.data())
def test_an_attempt_continues_at_the_chunks_of_the_previous_one(
    spec: ChunkSpec, num_frames: int, data: st.DataObject
) -> None:
    chunks = list(windows(spec, num_frames))
    num_made = data.draw(st.integers(0, len(chunks)))
    assert list(windows(spec, num_frames, _next(chunks[:num_made]))) == chunks[num_made:]


@given(SPECS, st.integers(0, 200))
def test_a_chunk_may_end_after_each_of_its_frames(spec: ChunkSpec, start: int) -> None:
    """Also within a chunk, where another schedule has ended: the next boundary is the same."""
    end = end_of(spec, start)
    assert start < end <= start + max(spec.size, *spec.first, 1)
    assert {end_of(spec, frame) for frame in range(start, end)} == {end}


def _next(chunks: list[Window]) -> int:
    return chunks[-1].end if chunks else 0
