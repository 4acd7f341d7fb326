"""Language models that speak: the tokens that are codes of a codec, and the form of their prompts.

A folder declares its codes by `code_offset` and `num_codes` in its config.json. An Orpheus model is
a Llama with the codes of SNAC as additional tokens, and is recognized by their names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ORPHEUS_TOKEN = "<custom_token_{}>"
ORPHEUS_VOICES = ("tara", "leah", "jess", "leo", "dan", "mia", "zac", "zoe")
"""Voices of the English models, the best one first."""
ORPHEUS_PLACES, ORPHEUS_CODES = 7, 4096
# 9.4 characters a second.
ORPHEUS_CHARACTERS_PER_FRAME = 0.8
# Numbers of custom tokens. The first ones mark the parts of a dialogue.
START_OF_SPEECH, END_OF_SPEECH, START_OF_TURN, END_OF_TURN, START_OF_REPLY = 1, 2, 3, 4, 5
FIRST_CODE = 10


@dataclass(frozen=True, slots=True)
class CodeTokens:
    """Tokens that are codes. A frame has one token for each of its places, in this order."""

    first: int
    """Token of code 0 at the first place. The tokens of further places follow in order."""
    num_codes: int
    """Number of different codes at one place."""
    num_places: int = 1
    opening: tuple[int, ...] = ()
    """Tokens before a text."""
    closing: tuple[int, ...] = ()
    """Tokens after a text."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end a speech; if empty, the folder names them."""
    characters_per_frame: float | None = None
    """Fewest characters of a frame, in slow speech. Longer texts than fit into a speech are spoken
    in pieces; None for models that refuse them."""
    names_voice: bool = False
    """Whether the voice is a name before the text, as in `tara: Hello`. Otherwise it is the token
    `<|voice_NAME|>` after it."""

    @property
    def token_ids(self) -> range:
        """Tokens of all places."""
        return range(self.first, self.first + self.num_codes * self.num_places)

    def at(self, place: int) -> range:
        """Return the tokens of a place."""
        first = self.first + place * self.num_codes
        return range(first, first + self.num_codes)

    def frames_of(self, token_ids: Sequence[int]) -> list[list[int]]:
        """Return the whole frames at the beginning of the tokens of a speech."""
        frames: list[list[int]] = [[]]
        for token_id in token_ids:
            place = len(frames[-1])
            if token_id not in self.at(place):
                break
            frames[-1].append(self.at(place).index(token_id))
            if place == self.num_places - 1:
                frames.append([])
        return frames[:-1]

    def tokens_of(self, frames: Sequence[Sequence[int]]) -> list[int]:
        """Return the tokens of frames."""
        return [self.at(place)[code] for frame in frames for place, code in enumerate(frame)]


def find_code_tokens(
    config: Mapping[str, Any], token_id_of: Callable[[str], int | None], vocab_size: int
) -> CodeTokens | None:
    """Return the codes of a model by its config.json; None for a model without codes.

    `token_id_of` returns the id of a token of the tokenizer, or None.
    """
    offset, num_codes = config.get("code_offset"), config.get("num_codes")
    codes = None
    if isinstance(offset, int) and isinstance(num_codes, int):
        codes = CodeTokens(offset, num_codes)
    elif is_orpheus(token_id_of):
        codes = _orpheus(token_id_of)
    if codes is None or codes.num_codes < 1 or codes.first < 0:
        return None
    return codes if codes.token_ids.stop <= vocab_size else None


def is_orpheus(token_id_of: Callable[[str], int | None]) -> bool:
    """Return whether a tokenizer with these tokens is one of an Orpheus model."""
    if (first := token_id_of(ORPHEUS_TOKEN.format(FIRST_CODE))) is None:
        return False
    num_codes = ORPHEUS_PLACES * ORPHEUS_CODES
    return token_id_of(ORPHEUS_TOKEN.format(FIRST_CODE + num_codes - 1)) == first + num_codes - 1


def _orpheus(token_id_of: Callable[[str], int | None]) -> CodeTokens:
    """Return the codes of Orpheus, with the prompt of its package `orpheus-speech`."""

    def find(*names: str) -> tuple[int, ...]:
        return tuple(token_id for name in names if (token_id := token_id_of(name)) is not None)

    def custom(number: int) -> str:
        return ORPHEUS_TOKEN.format(number)

    after = [custom(number) for number in (END_OF_TURN, START_OF_REPLY, START_OF_SPEECH)]
    (first,) = find(custom(FIRST_CODE))
    return CodeTokens(
        first,
        ORPHEUS_CODES,
        ORPHEUS_PLACES,
        opening=find(custom(START_OF_TURN), "<|begin_of_text|>"),
        closing=find("<|eot_id|>", *after),
        end_token_ids=frozenset(find(custom(END_OF_SPEECH))),
        characters_per_frame=ORPHEUS_CHARACTERS_PER_FRAME,
        names_voice=True,
    )
