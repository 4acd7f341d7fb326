"""Base64 as clients send it: with line ends, or without padding. Pure."""

import base64
import string

_SPACE = string.whitespace.encode()


def decode_base64(text: str) -> bytes:
    """Return the decoded bytes. White space is skipped, and padding may be missing.

    Raises ValueError for any other character.
    """
    data = text.encode()
    try:
        return base64.b64decode(data, validate=True)
    except ValueError:
        letters = data.translate(None, _SPACE).rstrip(b"=")
        if not letters:
            raise
        return base64.b64decode(letters + b"=" * (-len(letters) % 4), validate=True)
