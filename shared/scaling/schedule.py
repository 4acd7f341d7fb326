"""Weekly schedule of a pool's minimum. Pure."""

import re
from datetime import datetime
from typing import Annotated

from msgspec import Meta, Struct

DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
_HOURS = re.compile(r"([01]?\d|2[0-4])(?::([0-5]\d))?-([01]?\d|2[0-4])(?::([0-5]\d))?")
DAY_MIN = 24 * 60


class Shift(Struct, frozen=True, forbid_unknown_fields=True):
    """Hours of the week with another minimum of workers."""

    hours: str
    """First minute and end, such as `8-18` or `22:00-6:30`; hours that end earlier than they begin
    end on the next day."""
    min: Annotated[int, Meta(ge=1)]
    """Minimum number of workers in these hours."""
    days: str = "mon-sun"
    """Days on which the hours begin, such as `mon-fri` or `mon,wed,sat-sun`."""

    def __post_init__(self) -> None:
        if self._parse_days() is None:
            raise ValueError(f"days: {self.days!r} has no form such as mon-fri or mon,wed,sat-sun")
        if self._parse_hours() is None:
            raise ValueError(f"hours: {self.hours!r} has no form such as 8-18 or 22:00-6:30")

    def covers(self, now: datetime) -> bool:
        """Return whether the hours contain a local time."""
        days, hours = self._parse_days(), self._parse_hours()
        assert days is not None
        assert hours is not None
        begin, end = hours
        minute, weekday = 60 * now.hour + now.minute, now.weekday()
        if begin < end:
            return weekday in days and begin <= minute < end
        return (weekday in days and minute >= begin) or ((weekday - 1) % 7 in days and minute < end)

    def _parse_days(self) -> set[int] | None:
        days = set[int]()
        for part in self.days.split(","):
            first, dash, last = part.strip().partition("-")
            last = last if dash else first
            if first not in DAYS or last not in DAYS:
                return None
            begin, end = DAYS.index(first), DAYS.index(last)
            days |= {day % 7 for day in range(begin, end + 1 + 7 * (end < begin))}
        return days

    def _parse_hours(self) -> tuple[int, int] | None:
        """Return begin and end in minutes of the day."""
        if (match := _HOURS.fullmatch(self.hours)) is None:
            return None
        numbers = [int(text or 0) for text in match.groups()]
        begin, end = 60 * numbers[0] + numbers[1], 60 * numbers[2] + numbers[3]
        return (begin, end) if begin != end and begin < DAY_MIN and end <= DAY_MIN else None
