"""The commands of the first hour, in a clean clone, and what each must print."""

from typing import NamedTuple

from ops.first_hour.hub import NAME, PORT


class Step(NamedTuple):
    command: str
    expect: str
    """Regular expression for what is printed, without regard to case."""
    replies: tuple[tuple[str, str], ...] = ()
    """What is waited for while the command runs, as an expression, and typed then."""
    timeout_s: float = 300


IMAGE = "ops/demo_images/three_squares.png"
STEPS = (
    Step("make install", r"done in \d+ s", timeout_s=3000),
    Step(". .venv/bin/activate", ""),
    # It stands for the hub on the internet; `HF_ENDPOINT` is then not needed.
    Step("python -m ops.first_hour.hub &", "", ((f"{NAME} is at", "\n"),)),
    Step(f"HF_ENDPOINT=http://127.0.0.1:{PORT} pagemill pull {NAME}", rf"{NAME} is in "),
    Step("pagemill models", rf"{NAME} .*\bhere\b"),
    Step(f"pagemill up {NAME} &", r"ready at nats://", (("ready at .*\n", "\n"),)),
    Step(f'pagemill ask --model {NAME} --image {IMAGE} "How many shapes are there?"', r"\b3\b"),
    Step(
        f"pagemill chat --model {NAME}",
        r"\npurple",
        (
            ("> ", f"@{IMAGE} What colour are the shapes?\n"),
            # The line after each answer.
            (r"tokens[^>]*> ", "/quit\n"),
        ),
    ),
    Step("pagemill requests", r"(finished|stop|done)"),
    Step("kill -INT %2 && wait %2", "draining"),
)
