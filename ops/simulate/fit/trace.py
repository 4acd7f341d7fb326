"""The requests of a measured run: chats of token ids, which the simulator runs as well."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

from ops.simulate.engine import Link, Request

# Text tokens of the demo model; its control tokens come after them.
TOKEN_IDS = range(16, 700)
NUM_TEMPLATES = 6
MAX_PROMPT = 3800


@dataclass(frozen=True, slots=True)
class Turn:
    """One request of a chat."""

    at_s: float
    template: int
    chat: int
    token_ids: tuple[int, ...]
    lengths: tuple[int, ...]
    """Lengths of the template and of the turns up to this one, within the prompt."""
    answer: int
    """Tokens of the answer, which no end token cuts short."""


def chats(num_requests: int, rate: float, seed: int) -> list[Turn]:
    """Draw chats of several turns under popular templates, by their time."""
    rnd, found, now_s, chat = random.Random(seed), list[Turn](), 0.0, 0
    templates = [_text(rnd, rnd.randint(600, 1500)) for _ in range(NUM_TEMPLATES)]
    weights = [1 / (number + 1) for number in range(NUM_TEMPLATES)]
    # A chat has 2.5 turns in the mean. Later turns come after the end of the trace's beginning.
    while len(found) < 1.3 * num_requests:
        now_s += rnd.expovariate(rate / 2.5)
        chat += 1
        found += _chat(rnd, now_s, chat, rnd.choices(range(NUM_TEMPLATES), weights)[0], templates)
    found.sort(key=lambda turn: turn.at_s)
    return found[:num_requests]


def strangers(count: int, seed: int) -> list[Turn]:
    """Draw requests that share nothing."""
    rnd = random.Random(f"strangers:{seed}")
    prompts = [_text(rnd, 256) for _ in range(count)]
    return [Turn(0.0, -1, -number, ids, (256, 256), 4) for number, ids in enumerate(prompts)]


def _chat(
    rnd: random.Random,
    at_s: float,
    chat: int,
    template: int,
    templates: Sequence[tuple[int, ...]],
) -> list[Turn]:
    found, ids = list[Turn](), templates[template]
    lengths: tuple[int, ...] = (len(ids),)
    for _ in range(1 + min(5, int(rnd.expovariate(1 / 2)))):
        ids += _text(rnd, rnd.randint(60, 400))
        if len(ids) > MAX_PROMPT:
            break
        lengths += (len(ids),)
        found.append(Turn(at_s, template, chat, ids, lengths, rnd.randint(16, 64)))
        at_s += 2.0 + rnd.expovariate(1 / 4)
    return found


def _text(rnd: random.Random, length: int) -> tuple[int, ...]:
    return tuple(rnd.choices(TOKEN_IDS, k=length))


def to_request(turn: Turn, at_s: float, block: int) -> Request:
    """Return a turn for the simulator; only full blocks of `block` tokens can be cached."""
    keys = [(0, turn.template), *((1, turn.chat, n) for n in range(1, len(turn.lengths)))]
    chain: list[Link] = [
        (key, length // block * block) for key, length in zip(keys, turn.lengths, strict=True)
    ]
    prompt = len(turn.token_ids)
    return Request(
        at_s, prompt, turn.answer, (*chain, ((2, turn.chat, prompt), prompt + turn.answer))
    )
