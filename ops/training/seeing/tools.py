"""Tools of the training conversations, under many names, and questions that need one."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from typing import Any

ADD_NAMES = (
    "add", "sum", "plus", "add_numbers", "sum_of", "total", "addition", "get_sum", "calc_sum",
    "add_up", "add_two", "math_add", "compute_sum", "sum_numbers", "calculator",
)  # fmt: skip
ADD_ARGUMENTS = (
    ("a", "b"), ("x", "y"), ("first", "second"), ("left", "right"), ("one", "two"), ("n", "m"),
    ("p", "q"), ("number1", "number2"), ("u", "v"), ("num_a", "num_b"),
)  # fmt: skip
ADD_TEXTS = (
    "Adds two numbers.", "The sum of two numbers.", "Add numbers.", "Returns a plus b.",
    "Sum of both numbers", "Adds the two counts.", "Gives the total of two numbers.", "",
    "Calculates a sum.", "Use this to add.", "Adds.",
)  # fmt: skip
LOOKUP_NAMES = (
    "lookup", "find_name", "get_name", "name_of", "who_is", "look_up", "find", "search_name",
    "person", "directory", "get_person", "name_for", "lookup_name", "query", "find_person",
)  # fmt: skip
LOOKUP_ARGUMENTS = (
    "letter", "sign", "character", "key", "symbol", "of", "code", "name", "id", "text", "query",
)  # fmt: skip
LOOKUP_TEXTS = (
    "The name behind a letter.", "Finds the name for a letter or digit.", "Looks up a name.",
    "Who has this letter?", "Returns the person of a sign.", "Name by letter", "", "Find a name.",
    "Gives the name that belongs to a character.", "Searches for a person.",
)  # fmt: skip
# Tools that no picture needs.
OTHER_TOOLS = (
    ("weather", ("city",), "The weather of a city."), ("get_time", (), "What time is it?"),
    ("send", ("to", "text"), "Sends a message."), ("translate", ("text",), "Translates a text."),
    ("open_door", ("door",), "Opens a door."), ("play", ("song",), "Plays music."),
)  # fmt: skip
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
    name = varied(rng, rng.choice(ADD_NAMES))
    return ToolText(name, rng.choice(ADD_ARGUMENTS), rng.choice(ADD_TEXTS))


def lookup_tool(rng: random.Random) -> ToolText:
    name = varied(rng, rng.choice(LOOKUP_NAMES))
    return ToolText(name, (rng.choice(LOOKUP_ARGUMENTS),), rng.choice(LOOKUP_TEXTS))


def offered(rng: random.Random, *needed: ToolText) -> list[ToolText]:
    """The tools of a request: those that are needed, and perhaps others."""
    tools = list(needed)
    kinds = {len(tool.arguments) for tool in needed}
    if 1 not in kinds and rng.random() < 0.45:
        tools.append(lookup_tool(rng))
    if 2 not in kinds and rng.random() < 0.45:
        tools.append(add_tool(rng))
    if rng.random() < 0.15 or not tools:
        tools.append(ToolText(*rng.choice(OTHER_TOOLS)))
    rng.shuffle(tools)
    return tools


NAMES = (
    "Anna", "Ben", "Carla", "David", "Emma", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Karen",
    "Leo", "Mia", "Nora", "Oscar", "Paula", "Quinn", "Rosa", "Sam", "Tina", "Uwe", "Vera", "Willi",
    "Xenia", "Yara", "Zoe", "Alice", "Bob", "Carol", "Eve", "Frank", "Grace", "Heidi", "Ivan",
    "Judy", "Mallory", "Olivia", "Peggy", "Rupert", "Sybil", "Trent", "Victor", "Walter",
)  # fmt: skip


def some_name(rng: random.Random) -> str:
    """A result of `lookup`; half of them of letters that mean nothing, so that all are copied."""
    name = rng.choice(NAMES) if rng.random() < 0.5 else some_word(rng).capitalize()
    return f"{name} {some_word(rng).capitalize()}" if rng.random() < 0.2 else name
