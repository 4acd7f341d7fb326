"""Forecasts of the ends of batches."""

from shared.batches.pace import MIN_SPAN_S, SPAN_S, Pace


def paced(lines_per_s: float, seconds: int, step_s: int = 5) -> Pace:
    pace = Pace()
    for at_s in range(0, seconds + 1, step_s):
        pace.observe(at_s, int(lines_per_s * at_s))
    return pace


def test_a_batch_is_late_if_its_lines_take_longer_than_its_window() -> None:
    pace = paced(2.0, 120)
    assert not pace.is_late(1000, 500)
    assert pace.is_late(1001, 500)
    assert not pace.is_late(0, 0)


def test_a_batch_without_progress_is_late() -> None:
    assert paced(0.0, 120).is_late(1, 86_400)
    assert not paced(0.0, 120).is_late(0, 86_400)


def test_a_batch_that_has_just_begun_has_no_forecast() -> None:
    assert not Pace().is_late(1, 0)
    assert not paced(0.0, int(MIN_SPAN_S) - 5).is_late(1, 0)
    assert paced(0.0, int(MIN_SPAN_S)).is_late(1, 0)


def test_the_pace_follows_the_latest_progress() -> None:
    pace = paced(10.0, 1000)
    for at_s in range(1005, 1001 + int(SPAN_S), 5):
        pace.observe(at_s, 10_000)
    assert pace.is_late(100, 10_000)
    assert len(pace._samples) <= SPAN_S / 5 + 2
