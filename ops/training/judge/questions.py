"""Questions of the judge, from `questions.yaml`: forms that the training asks too, and new ones.

A test checks that no question of `unseen_wordings` can come up in the training.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

Table = dict[str, tuple[str, ...]]
Tool = tuple[str, tuple[str, ...], str]
"""Name, arguments and description."""


class Questions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    seen_wordings: Table
    unseen_wordings: Table
    chat_answers: tuple[str, ...]
    nothing_shown: str
    add_tools: tuple[Tool, ...]
    lookup_tools: tuple[Tool, ...]
    people: tuple[str, ...]


_FILE = Path(__file__).with_name("questions.yaml")
QUESTIONS = msgspec.yaml.decode(_FILE.read_bytes(), type=Questions)
