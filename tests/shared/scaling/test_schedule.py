"""Minima of pools by the hour of the week."""

from datetime import UTC, datetime
from zoneinfo import ZoneInfo

import pytest

from shared.errors import ConfigError
from shared.scaling.budget import with_schedule, with_sizes
from shared.scaling.pools import PoolSettings, ScalingSettings
from shared.scaling.schedule import Shift

WORK = Shift("8-18", 2, "mon-fri")
NIGHT = Shift("22:30-6:00", 1, "sat-sun")


def at(day: int, hour: int, minute: int = 0) -> datetime:
    """Return a time in a week in which the first day is a Monday."""
    return datetime(2026, 11, 22 + day, hour, minute, tzinfo=UTC)


@pytest.mark.parametrize(
    ("shift", "now", "is_covered"),
    [
        (WORK, at(1, 7, 59), False),
        (WORK, at(1, 8), True),
        (WORK, at(5, 17, 59), True),
        (WORK, at(5, 18), False),
        (WORK, at(6, 12), False),
        (NIGHT, at(6, 5), False),
        (NIGHT, at(6, 22, 30), True),
        (NIGHT, at(7, 5, 59), True),
        (NIGHT, at(8, 5, 59), True),
        (NIGHT, at(8, 6), False),
        (NIGHT, at(8, 23), False),
        (Shift("0-24", 1, "wed,fri-mon"), at(2, 12), False),
        (Shift("0-24", 1, "wed,fri-mon"), at(3, 23, 59), True),
        (Shift("0-24", 1, "wed,fri-mon"), at(1, 0), True),
        (Shift("0-24", 1), at(4, 12), True),
    ],
)
def test_hours_begin_on_their_days(shift: Shift, now: datetime, is_covered: bool) -> None:
    assert shift.covers(now) == is_covered


@pytest.mark.parametrize(
    ("days", "hours", "message"),
    [
        ("monday", "8-18", "days: 'monday' has no form such as mon-fri"),
        ("", "8-18", "days: '' has no form"),
        ("mon-", "8-18", "days: 'mon-' has no form"),
        ("mon", "8", "hours: '8' has no form such as 8-18"),
        ("mon", "8-8", "hours: '8-8' has no form"),
        ("mon", "8-24:30", "hours: '8-24:30' has no form"),
        ("mon", "24-6", "hours: '24-6' has no form"),
        ("mon", "8-18:60", "hours: '8-18:60' has no form"),
    ],
)
def test_hours_that_cannot_be_are_refused(days: str, hours: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Shift(hours, 1, days)


def test_a_shift_is_the_min_of_its_hours_and_begins_a_start_earlier() -> None:
    pool = PoolSettings(min=1, max=4, schedule=(WORK, Shift("9-10", 3)))
    scaling = ScalingSettings({"engine": pool})

    def least(now: datetime, start_s: float = 0.0) -> int:
        return with_schedule(scaling, now, {"engine": start_s}).pools["engine"].min

    assert [least(at(1, hour)) for hour in (7, 8, 9, 10, 18)] == [1, 2, 3, 2, 1]
    assert least(at(1, 7, 59), start_s=59.0) == 1
    assert least(at(1, 7, 59), start_s=61.0) == 2
    assert least(at(1, 17, 59), start_s=61.0) == 2
    # 8:00 in Berlin is 7:00 in UTC.
    assert least(at(1, 7).astimezone(ZoneInfo("Europe/Berlin"))) == 2


def test_a_schedule_fits_into_max_and_the_budget() -> None:
    with pytest.raises(ValueError, match="schedule: min: 2 is more than max, 1"):
        PoolSettings(schedule=(WORK,))
    pool = PoolSettings(max=4, schedule=(WORK,))
    with pytest.raises(ConfigError, match="budget: 3 is less than the pools' min together, 4"):
        ScalingSettings({"engine": pool, "encoder": pool}, budget=3)


def test_a_size_of_an_operator_may_use_what_a_schedule_does_not_need_now() -> None:
    scaling = ScalingSettings(
        {"engine": PoolSettings(max=4), "encoder": PoolSettings(max=4, schedule=(WORK,))}, budget=4
    )
    for hour, size in ((7, 4), (8, 2)):
        now = with_schedule(scaling, at(1, hour), {})
        assert with_sizes(now, {"engine": 4}).pools["engine"].min == size
