"""The checks of model folders in the process of the caller, which has transformers in memory."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from workers.cli.models.reports import Report
from workers.engine.model.check_folders import PoolingMode, examine
from workers.generator.check_folders import find_reason


def check_by_generator(folders: Sequence[Path]) -> list[str | None]:
    """Return the answer of `reports.check_by_generator`, which starts a process."""
    return [find_reason(folder) for folder in folders]


def check_by_engine(rows: Sequence[tuple[Path, PoolingMode | None, int]]) -> list[Report]:
    """Return the reports of `reports.check_by_engine`, which starts a process."""
    reports = [examine(*row) for row in rows]
    return msgspec.convert(reports, list[Report], from_attributes=True)
