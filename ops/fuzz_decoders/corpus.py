"""The recorded inputs of each target: a file of lines in base64, and the choice of inputs."""

import base64
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from types import FrameType
from typing import Any

from ops.fuzz_decoders.target import FuzzTarget

ROOT = Path(__file__).parent.parent.parent
CORPUS = ROOT / "tests" / "recorded" / "fuzz"
MAX_INPUTS = 40
MAX_INPUT_BYTES = 2048

Edge = tuple[str, int, int]
"""File, and the lines that ran one after the other; 0 at the beginning of a function."""


def read_corpus(name: str) -> list[bytes]:
    path = CORPUS / f"{name}.txt"
    return [base64.b64decode(line) for line in path.read_bytes().split()] if path.exists() else []


def write_corpus(name: str, inputs: Iterable[bytes]) -> None:
    lines = [base64.b64encode(data) + b"\n" for data in inputs if data]
    (CORPUS / f"{name}.txt").write_bytes(b"".join(lines))


def choose(target: FuzzTarget, inputs: Iterable[bytes]) -> tuple[list[bytes], int]:
    """Return the inputs that together reach all edges and answers, and the number of edges."""
    reached: set[object] = set()
    chosen: list[bytes] = []
    for data in sorted(set(inputs), key=lambda data: (len(data), data)):
        edges, answer = trace(target, data)
        # msgspec is C: only the text of its error shows which of its branches ran.
        features = edges | {re.sub(r"\d+|`[^`]*`|'[^']*'", "", answer)}
        if features - reached:
            reached |= features
            if len(chosen) < MAX_INPUTS and len(data) <= MAX_INPUT_BYTES:
                chosen.append(data)
    return chosen, sum(isinstance(item, tuple) for item in reached)


def trace(target: FuzzTarget, data: bytes) -> tuple[set[object], str]:
    """Return the edges of our code that an input reaches, and the answer to it."""
    edges: set[object] = set()
    last: dict[FrameType, int] = {}

    def step(frame: FrameType, event: str, _: Any) -> Any:
        file = frame.f_code.co_filename
        if not file.startswith((str(ROOT / "shared"), str(ROOT / "workers"))):
            return None
        if event == "line":
            edges.add((file, last.get(frame, 0), frame.f_lineno))
            last[frame] = frame.f_lineno
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        value = target.answer(data)
        answer = f"{type(value).__name__}: {value if isinstance(value, Exception) else ''}"
    except Exception as error:
        answer = f"crash: {error!r}"
    finally:
        sys.settrace(before)
    return edges, answer
