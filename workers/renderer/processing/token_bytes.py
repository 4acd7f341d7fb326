"""What each token stands for in bytes, which a tokenizer's own decoding tells of whole texts only.

Two families of tokenizers are known, by their decoder: those that spell every byte as a printable
character of its own (GPT-2's byte level), and those that have pieces of text, with a mark in the
place of blanks and the bytes of what is in no piece as `<0x0A>` (SentencePiece's).
"""

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenByteDecoder:
    def __init__(self, tokenizer: Any) -> None:
        """`tokenizer` is the one of the tokenizers library."""
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._byte_level = _names_byte_level(decoder)

    def bytes_of(self, token_id: int) -> bytes:
        """Empty for an id that the tokenizer does not have."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelt: str | None = self._tokenizer.id_to_token(token_id)
        if spelt is None:
            return b""
        if self._byte_level and all(char in _BYTE_OF for char in spelt):
            return bytes(_BYTE_OF[char] for char in spelt)
        if (match := _BYTE.fullmatch(spelt)) is not None:
            return bytes.fromhex(match[1])
        return spelt.replace(_BLANK, " ").encode()


def _names_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(map(_names_byte_level, inner))


def _byte_characters() -> dict[str, int]:
    """GPT-2's: printable bytes are their Latin-1 characters, the others follow from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    found = {chr(byte): byte for byte in printable}
    return found | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
