"""Tokens that were added to the tokenizer of a model's folder."""

import json
from collections.abc import Callable
from pathlib import Path


def read_token_ids(folder: Path) -> Callable[[str], int | None]:
    """Return a function for the ids of tokens that were added to a folder's tokenizer.

    It knows no token if the file cannot be read or does not mention the token.
    """

    def find(token: str) -> int | None:
        try:
            content = (folder / "tokenizer.json").read_bytes()
            # The file of a large vocabulary takes a second to parse.
            if token.encode() not in content:
                return None
            added = json.loads(content)["added_tokens"]
            return next((entry["id"] for entry in added if entry["content"] == token), None)
        except (OSError, ValueError, KeyError, TypeError):
            return None

    return find
