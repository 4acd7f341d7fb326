"""The protocol of the benchmark with a peer's process: JSON lines on its stdin and stdout.

The benchmark sends a Setup and gets an empty object; then it sends lists of requests, each of which
is answered with a Result. A Failed may come instead, and is the last line. Times are seconds since
the requests were submitted, all at once. Peers have their own interpreters, so this module needs
only the standard library.
"""

import dataclasses
import json
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Setup:
    """Settings that are the same for every peer, as far as it has them."""

    model: str
    """Folder of the model."""
    threads: int
    max_model_len: int = 2048
    max_num_seqs: int = 32
    max_num_batched_tokens: int = 2048
    kv_cache_gib: int = 1
    profile: bool = False
    """Whether `Result.phases` is filled, by peers that can."""


@dataclass(frozen=True, slots=True)
class Request:
    """A greedy request of full length: the end-of-text token does not end it.

    It has either token ids, or an image with a text, which go into the model's chat template.
    """

    max_tokens: int
    token_ids: list[int] = field(default_factory=list)
    image: str | None = None
    """Path of a PNG file."""
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
    """Length of the prompt; None where the peer does not report it."""


@dataclass(frozen=True, slots=True)
class Result:
    wall_s: float
    answers: list[Answer]
    phases: dict[str, float] = field(default_factory=dict)
    """Seconds by phase of a step; all of them are within `wall_s`."""


@dataclass(frozen=True, slots=True)
class Failed:
    """An error that has ended the process of the peer."""

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
