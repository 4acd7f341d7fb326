"""Files of the batches of a run, as their clients received them over HTTP."""

import json
from pathlib import Path
from typing import Any, Literal

from msgspec import Struct

from ops.chaos.batch_plan import PlannedBatch

Part = Literal["input", "output", "errors", "results"]
SINGLES = "singles.jsonl"


class Single(Struct, frozen=True):
    """Answer to the body of a line that was sent alone."""

    status: int
    body: dict[str, Any]


class ReceivedBatch(Struct, frozen=True):
    """The last state of a batch, and its files."""

    planned: PlannedBatch
    body: dict[str, Any]
    """Description of the batch; empty if no gateway has accepted it."""
    input: bytes
    output: bytes
    errors: bytes
    results: bytes
    """Lines that were read while the batch ran."""


class BatchFolder:
    """The files of all batches of a run, which the process of its clients writes."""

    def __init__(self, load_folder: Path) -> None:
        self._path = load_folder / "batches"
        self._path.mkdir(exist_ok=True)
        self._singles = self._path / SINGLES

    def write_part(self, name: str, part: Part, content: bytes) -> None:
        (self._path / f"{name}.{part}").write_bytes(content)

    def write_body(self, name: str, body: bytes) -> None:
        (self._path / f"{name}.json").write_bytes(body)

    def add_single(self, key: str, status: int, body: bytes) -> None:
        with self._singles.open("a") as file:
            file.write(json.dumps([key, status, json.loads(body)]) + "\n")

    def singles(self) -> dict[str, Single]:
        if not self._singles.exists():
            return {}
        lines = self._singles.read_text().split("\n")[:-1]
        return {key: Single(status, body) for key, status, body in map(json.loads, lines)}

    def batch(self, planned: PlannedBatch) -> ReceivedBatch:
        body = json.loads(self._read(f"{planned.name}.json") or b"{}")
        parts = ("input", "output", "errors", "results")
        return ReceivedBatch(planned, body, *(self._read(f"{planned.name}.{p}") for p in parts))

    def _read(self, name: str) -> bytes:
        file = self._path / name
        return file.read_bytes() if file.exists() else b""
