"""Token byte decoder: converts single tokens to bytes.

A tokenizer decodes only whole texts. Two kinds of tokenizers are recognized by their decoder.
GPT-2's byte level maps every byte to a printable character. SentencePiece has pieces of text with a
mark in place of spaces, and spells bytes outside its pieces as `<0x0A>`.
"""

import json
import re
from typing import Any

_BYTE = re.compile(r"<0x([0-9A-F]{2})>")
_BLANK = "\N{LOWER ONE EIGHTH BLOCK}"


class TokenByteDecoder:
    def __init__(self, tokenizer: Any) -> None:
        """Wrap a tokenizer of the tokenizers library."""
        self._tokenizer = tokenizer
        self._added: dict[int, str] = {
            token_id: token.content
            for token_id, token in tokenizer.get_added_tokens_decoder().items()
        }
        decoder = json.loads(tokenizer.to_str()).get("decoder")
        self._byte_level = _names_byte_level(decoder)

    def bytes_of(self, token_id: int) -> bytes:
        """Return the token's bytes; empty for an id that the tokenizer does not have."""
        if token_id in self._added:
            return self._added[token_id].encode()
        spelling: str | None = self._tokenizer.id_to_token(token_id)
        if spelling is None:
            return b""
        if self._byte_level and all(char in _BYTE_OF for char in spelling):
            return bytes(_BYTE_OF[char] for char in spelling)
        if (match := _BYTE.fullmatch(spelling)) is not None:
            return bytes.fromhex(match[1])
        return spelling.replace(_BLANK, " ").encode()


def _names_byte_level(decoder: Any) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders", [])
    return decoder.get("type") == "ByteLevel" or any(map(_names_byte_level, inner))


def _byte_characters() -> dict[str, int]:
    """Return GPT-2's map: printable bytes are Latin-1 characters, others begin at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in printable]
    characters = {chr(byte): byte for byte in printable}
    return characters | {chr(0x100 + number): byte for number, byte in enumerate(others)}


_BYTE_OF = _byte_characters()
