"""Token masks of a model's own rules: the beginning of Whisper's answers, and codes of speeches."""

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from shared.models.language import TokenRules
from shared.protocol.code_tokens import CodeTokens


class RulesMask:
    """Mask of one choice; implements `workers.engine.core.sequence.TokenMask`."""

    def __init__(self, rules: TokenRules, vocab_size: int) -> None:
        self._rules = rules
        self._vocab_size = vocab_size
        self._num_tokens = 0

    def allowed(self) -> NDArray[np.int32] | None:
        rules, num_after = self._rules, self._num_tokens - len(self._rules.beginning)
        if num_after < 0:
            return pack_tokens(rules.beginning[num_after], self._vocab_size)
        suppressed = rules.suppressed if num_after else rules.suppressed + rules.suppressed_first
        return ~pack_tokens(suppressed, self._vocab_size) if suppressed else None

    def advance(self, token_id: int) -> None:
        self._num_tokens += 1


class CodesMask:
    """Mask of a speech with several tokens a frame: each token is a code of its place, or an end
    token after whole frames. Implements `TokenMask`."""

    def __init__(self, codes: CodeTokens, end_token_ids: frozenset[int], vocab_size: int) -> None:
        self._codes = codes
        self._end_token_ids = tuple(sorted(end_token_ids))
        self._vocab_size = vocab_size
        self._place = 0

    def allowed(self) -> NDArray[np.int32]:
        return _mask_of(self._codes, self._place, self._end_token_ids, self._vocab_size)

    def advance(self, token_id: int) -> None:
        self._place = (self._place + 1) % self._codes.num_places


@lru_cache(16)
def _mask_of(
    codes: CodeTokens, place: int, end_token_ids: tuple[int, ...], vocab_size: int
) -> NDArray[np.int32]:
    return pack_tokens((*codes.at(place), *(() if place else end_token_ids)), vocab_size)


@lru_cache(16)
def pack_tokens(token_ids: tuple[int, ...], vocab_size: int) -> NDArray[np.int32]:
    """Return a bit for each token, which is set for these."""
    bits = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    bits[[*token_ids]] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)
