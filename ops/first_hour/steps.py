"""The commands of docs/guide/first-hour.md, and the output that each must print."""

from typing import NamedTuple

MODEL = "pagemill/demo-vlm"
# It stands for the latest id of a request that a command has printed.
REQUEST = "{request}"
IMAGE = "ops/demo_images/three_squares.png"


class Step(NamedTuple):
    command: str
    expect: str
    """Regular expression for the output, without regard to case."""
    replies: tuple[tuple[str, str], ...] = ()
    """Pairs of a regular expression to wait for while the command runs, and the text typed then."""
    timeout_s: float = 300
    terminal: int = 0
    is_left_running: bool = False
    """Whether the step ends with the expected output, and not with the command."""
    keys: str | None = None
    """Text to type; by default the command and a newline."""


STEPS = (
    Step("make install", r"done in \d+ s", timeout_s=3000),
    Step(". .venv/bin/activate", ""),
    Step(f"pagemill pull {MODEL}", rf"{MODEL} is in "),
    Step("pagemill models", rf"{MODEL} .*\bhere\b"),
    Step(f"pagemill up {MODEL}", r"ready at nats://.*\n", is_left_running=True),
    Step(". .venv/bin/activate", "", terminal=1),
    Step(
        f"pagemill chat --model {MODEL}",
        r"\npurple",
        (
            ("> ", f"@{IMAGE} What colour are the shapes?\n"),
            # The line after each answer.
            (r"tokens[^>]*> ", "/quit\n"),
        ),
        terminal=1,
    ),
    Step("pagemill requests", r"finished", terminal=1),
    Step(f"pagemill where {REQUEST}", r"state +finished", terminal=1),
    Step(f"pagemill follow {REQUEST}", "purple", terminal=1),
)
# The end of `pagemill up`.
STOP = Step("Ctrl-C", "draining", keys="\x03")
