"""What the benchmark and a peer's process say to one another: JSON lines on its stdin and stdout.

The benchmark sends a Setup and is answered with an empty object; then it sends lists of requests,
each of which is answered with a Result. A Failed may come instead, and is the last line. Times are
seconds since the requests were submitted, all at once. Peers bring their own interpreters, so this
needs nothing but the standard library.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Setup:
    """The same for every peer, as far as it has such settings."""

    model: str
    """Its folder."""
    threads: int
    max_model_len: int = 2048
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_cache_gib: int = 1
    profile: bool = False
    """Have `Result.phases` filled, by who can."""


@dataclass(frozen=True, slots=True)
class Request:
    """Greedy, and to the full length: the end-of-text token ends nothing. Either token ids, or a
    picture with a text about it, put into the model's chat template."""

    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    picture: str | None = None
    """A PNG file."""
    text: str = ""

    @property
    def messages(self) -> list[dict[str, Any]]:
        parts = [{"type": "image"}, {"type": "text", "text": self.text}]
        return [{"role": "user", "content": parts}]


@dataclass(frozen=True, slots=True)
class Answer:
    token_ids: list[int]
    first_s: float
    last_s: float
    num_prompt_tokens: int | None = None
    """None where the peer does not tell."""


@dataclass(frozen=True, slots=True)
class Result:
    wall_s: float
    answers: list[Answer]
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of a step; all of it is within `wall_s`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The peer could not; its process has ended."""

    message: str


def write(value: Any) -> str:
    return json.dumps(value, default=dataclasses.asdict) + "\n"


def read_requests(line: str) -> list[Request]:
    return [Request(**tree) for tree in json.loads(line)]


def read_failed(line: str) -> Failed | None:
    tree = json.loads(line)
    return Failed(**tree) if "message" in tree else None


def read_result(line: str) -> Result:
    tree = json.loads(line)
    answers = [Answer(**answer) for answer in tree.pop("answers")]
    return Result(answers=answers, **tree)
