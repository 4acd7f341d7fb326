"""Tools of the training conversations, under many names, and questions that need one."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

Described = tuple[str, tuple[str, ...], str]
"""Name, arguments and description of a tool."""


class Tools(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    add_names: tuple[str, ...]
    add_arguments: tuple[tuple[str, ...], ...]
    add_texts: tuple[str, ...]
    lookup_names: tuple[str, ...]
    lookup_arguments: tuple[str, ...]
    lookup_texts: tuple[str, ...]
    other_tools: tuple[Described, ...]
    people: tuple[str, ...]


TOOLS = msgspec.yaml.decode(Path(__file__).with_name("tools.yaml").read_bytes(), type=Tools)
RANDOM_NAME_SHARE = 0.3
LETTERS = "abcdefghijklmnopqrstuvwxyz"


@dataclass(frozen=True, slots=True)
class ToolText:
    """One tool as the prompt describes it."""

    name: str
    arguments: tuple[str, ...]
    text: str

    def line(self) -> str:
        return f"{self.name}({', '.join(self.arguments)}): {self.text}\n"

    def call(self, *values: Any) -> str:
        arguments = json.dumps(dict(zip(self.arguments, values, strict=True)), ensure_ascii=False)
        return f'<tool_call>\n{{"name": "{self.name}", "arguments": {arguments}}}\n</tool_call>'

    def definition(self) -> dict[str, Any]:
        """The tool as a client gives it."""
        properties = {name: {"type": "string"} for name in self.arguments}
        return {
            "type": "function",
            "function": {
                "name": self.name,
                "description": self.text,
                "parameters": {"type": "object", "properties": properties},
            },
        }


def some_word(rng: random.Random) -> str:
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(2, 6)))


def varied(rng: random.Random, name: str) -> str:
    """The name, or one of words that say nothing, so that names are copied and not remembered."""
    lot = rng.random()
    if lot < RANDOM_NAME_SHARE / 2:
        return f"{name}_{some_word(rng)}" if rng.random() < 0.5 else f"{some_word(rng)}_{name}"
    return name


def add_tool(rng: random.Random) -> ToolText:
    name = varied(rng, rng.choice(TOOLS.add_names))
    return ToolText(name, rng.choice(TOOLS.add_arguments), rng.choice(TOOLS.add_texts))


def lookup_tool(rng: random.Random) -> ToolText:
    name = varied(rng, rng.choice(TOOLS.lookup_names))
    return ToolText(name, (rng.choice(TOOLS.lookup_arguments),), rng.choice(TOOLS.lookup_texts))


def offered(rng: random.Random, *needed: ToolText) -> list[ToolText]:
    """The tools of a request: those that are needed, and perhaps others."""
    tools = list(needed)
    kinds = {len(tool.arguments) for tool in needed}
    if 1 not in kinds and rng.random() < 0.45:
        tools.append(lookup_tool(rng))
    if 2 not in kinds and rng.random() < 0.45:
        tools.append(add_tool(rng))
    if rng.random() < 0.15 or not tools:
        tools.append(ToolText(*rng.choice(TOOLS.other_tools)))
    rng.shuffle(tools)
    return tools


def some_name(rng: random.Random) -> str:
    """A result of `lookup`; half of them of letters that mean nothing, so that all are copied."""
    name = rng.choice(TOOLS.people) if rng.random() < 0.5 else some_word(rng).capitalize()
    return f"{name} {some_word(rng).capitalize()}" if rng.random() < 0.2 else name
