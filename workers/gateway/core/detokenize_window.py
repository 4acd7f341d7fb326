"""The text that new tokens add to what is out already, from the text of whole runs of them. Pure.

A tokenizer may write the first token of a text in another way than a later one, so the last tokens
stay as context; and a character may need several tokens, so one that is not whole waits.
"""

from typing import NamedTuple

# A character has at most 4 bytes, hence tokens; the rest is context.
NUM_CONTEXT_TOKENS = 16
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class DetokenizeWindow(NamedTuple):
    token_ids: list[int]
    num_out: int
    """Characters of their text that are out."""


def context_of(token_ids: list[int]) -> list[int]:
    return token_ids[-NUM_CONTEXT_TOKENS:]


def open_window(token_ids: list[int], text: str) -> DetokenizeWindow:
    """Before an answer: the end of its prompt, and the text of that."""
    return DetokenizeWindow(token_ids, len(text) - _num_waiting(text))


def advance_window(
    window: DetokenizeWindow, token_ids: list[int], text: str, kept_text: str, last: bool
) -> tuple[str, DetokenizeWindow]:
    """What is new in `text`, that of the window's tokens and these; and the window that is left.

    `kept_text` is the text of those that are `context_of`; `last` for no more to come.
    """
    num_waiting = 0 if last else _num_waiting(text)
    new = text[window.num_out : len(text) - num_waiting]
    left = context_of(window.token_ids + token_ids)
    return new, DetokenizeWindow(left, max(0, len(kept_text) - num_waiting))


def _num_waiting(text: str) -> int:
    return int(text.endswith(REPLACEMENT))
