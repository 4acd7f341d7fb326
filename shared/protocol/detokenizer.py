"""Incremental detokenization: the text that new tokens add to an answer, and its stop strings.

The text depends on the tokens alone. A worker that pushes the same tokens again reaches the same
state, so a resumed answer continues with the character after the last published one.
"""

from collections.abc import Callable
from typing import NamedTuple

# A tokenizer may write the first token of a text differently from a later one, so the tokens of the
# last text stay as context.
MAX_CONTEXT_TOKENS = 16
# A character has at most 4 bytes, so at most 3 tokens wait for its last byte. More tokens are not
# a character, and holding them back would make every token more expensive than the previous one.
MAX_HELD_TOKENS = 16

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class TokenWindow(NamedTuple):
    """End of a text: the tokens that the text of further tokens depends on."""

    token_ids: list[int]
    """Context tokens with returned text, followed by held tokens."""
    num_out: int
    """Characters in the text of the context tokens."""
    num_held: int = 0
    """Number of held tokens. Their text is not returned yet, because it ends inside a character."""


EMPTY_WINDOW = TokenWindow([], 0)

Decode = Callable[[list[int]], str]


def read_text(
    decode: Decode, window: TokenWindow, token_ids: list[int], *, is_last: bool = False
) -> tuple[str, TokenWindow]:
    """Return the text that `token_ids` add after `window`, and the next window.

    Tokens at the end are held if they are part of a character, unless no tokens follow (`is_last`)
    or there are more than a character can have.
    """
    start = len(window.token_ids) - window.num_held
    whole = window.token_ids + token_ids
    if start == len(whole):
        return "", window
    text, end = decode(whole), len(whole)
    if not is_last and _is_incomplete(text, window):
        # Shorter prefixes within the window were incomplete when they were read.
        oldest = max(len(window.token_ids), len(whole) - MAX_HELD_TOKENS)
        for length in range(len(whole) - 1, oldest, -1):
            prefix = decode(whole[:length])
            if not _is_incomplete(prefix, window):
                text, end = prefix, length
                break
        else:
            if len(whole) - start < MAX_HELD_TOKENS:
                return "", TokenWindow(whole, window.num_out, len(whole) - start)
    new = text[window.num_out :]
    if not new:
        # Special tokens have no text, and would push the context out of the window.
        return "", TokenWindow(whole[:start] + whole[end:], window.num_out, len(whole) - end)
    context = whole[start:end][-MAX_CONTEXT_TOKENS:]
    num_out = 0 if is_last else len(decode(context))
    return new, TokenWindow(context + whole[end:], num_out, len(whole) - end)


def _is_incomplete(text: str, window: TokenWindow) -> bool:
    return text.endswith(REPLACEMENT, window.num_out)


class Detokenizer:
    """Converts token ids to pieces of text, up to the first stop string.

    The first complete stop string ends the text; if several are complete at once, the longest one
    does. With `include_stop`, the text includes the stop string.
    """

    def __init__(self, decode: Decode, stop: list[str], include_stop: bool = False) -> None:
        self._decode = decode
        self._stop = stop
        self._include_stop = include_stop
        self._window = EMPTY_WINDOW
        self._held = ""
        """Text that may yet become a stop string."""
        self._num_exempt = 0
        """Number of characters at the beginning of the held text that are not searched."""

    def push(self, token_id: int, may_stop: bool = True) -> tuple[str, str | None]:
        """Return the text that cannot become part of a stop string, and the stop string, if any.

        A stop string that ends in the text of a token without `may_stop` is ignored.
        """
        self._held += self._read([token_id])
        if not may_stop:
            self._num_exempt = len(self._held)
        matched = self._cut()
        num_sure = len(self._held) - (0 if matched else _overlap(self._held, self._stop))
        text, self._held = self._held[:num_sure], self._held[num_sure:]
        self._num_exempt = max(0, self._num_exempt - num_sure)
        return text, matched

    def read(self, token_ids: list[int]) -> str:
        """Return the text of further tokens, at once. There must be no stop strings.

        It is the text that the tokens would have one after the other.
        """
        text, window = read_text(self._decode, self._window, token_ids)
        if REPLACEMENT in text or window.num_held or not window.num_out:
            # The text of bytes that are no character depends on the tokens that are read with them.
            return "".join([self._read([token_id]) for token_id in token_ids])
        self._window = window
        return text

    def finish(self) -> str:
        """Return the held text. No tokens may follow."""
        self._held += self._read([], is_last=True)
        self._cut()
        text, self._held = self._held, ""
        self._window = EMPTY_WINDOW
        return text

    def _read(self, token_ids: list[int], *, is_last: bool = False) -> str:
        text, self._window = read_text(self._decode, self._window, token_ids, is_last=is_last)
        return text

    def _cut(self) -> str | None:
        """Cut the held text at a stop string, and drop the rest."""
        places = [(self._find(stop), stop) for stop in self._stop]
        matches = [(start, stop) for start, stop in places if start >= 0]
        if not matches:
            return None
        start, matched = min(matches, key=lambda match: (match[0] + len(match[1]), match[0]))
        self._held = self._held[: start + len(matched) if self._include_stop else start]
        self._window = EMPTY_WINDOW
        return matched

    def _find(self, stop: str) -> int:
        """Return the index of a stop string in the held text, -1 if it is not there."""
        return self._held.find(stop, max(0, self._num_exempt - len(stop) + 1))


def _overlap(text: str, stop: list[str]) -> int:
    """Return the length of the longest end of `text` that is the beginning of a stop string."""
    longest = max((len(s) for s in stop), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(s.startswith(text[-length:]) for s in stop):
            return length
    return 0
