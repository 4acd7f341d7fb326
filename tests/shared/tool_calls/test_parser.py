"""Tool calls in the text of an answer: all formats, any chunk boundaries, text without calls."""

import itertools
import json
from collections.abc import Iterator
from typing import SupportsIndex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.tool_calls.parser import ToolParser
from shared.tool_calls.scanner import Call, Piece

NAMES = ["weather", "time-of_day"]
Read = tuple[str, list[tuple[str, str]]]


def read(form: str, pieces: list[str], *, one_call: bool = False) -> Read:
    parser = ToolParser(form, NAMES, one_call=one_call)
    chunks: list[Piece] = []
    for piece in pieces:
        chunks += parser.feed(piece)
    chunks += parser.end()
    content = ""
    calls: list[tuple[str, str]] = []
    for part in chunks:
        if not isinstance(part, Call):
            content += part.text
        elif part.name is not None:
            assert part.index == len(calls)
            calls.append((part.name, part.arguments))
        else:
            name, arguments = calls[part.index]
            calls[part.index] = name, arguments + part.arguments
    return content, calls


ARGUMENTS = '{"city": "Bonn }] \\"x\\"", "days": [1, {"a": null}]}'
CASES = {
    "hermes": [
        ("Just text, 1 < 2.", ("Just text, 1 < 2.", [])),
        (
            f'Hm.\n<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>',
            ("Hm.\n", [("weather", ARGUMENTS)]),
        ),
        (
            f'<tool_call>{{"name":"weather","arguments":{ARGUMENTS}}}</tool_call>\n'
            '<tool_call>{"arguments": {"a": 1}, "name": "time-of_day"}</tool_call>\n',
            ("", [("weather", ARGUMENTS), ("time-of_day", '{"a": 1}')]),
        ),
        (
            '<tool_call>{"name": "weather"}</tool_call> Done.',
            (" Done.", [("weather", "{}")]),
        ),
        (
            '<tool_call>{"name": "nobody", "arguments": {}}</tool_call>',
            ('<tool_call>{"name": "nobody", "arguments": {}}</tool_call>', []),
        ),
        (
            "<tool_call>__import__('os')</tool_call>",
            ("<tool_call>__import__('os')</tool_call>", []),
        ),
        ("<tool_<tool_call>", ("<tool_<tool_call>", [])),
        ('<tool_call>{"name": "wea', ('<tool_call>{"name": "wea', [])),
        (
            '<tool_call>{"name": "weather", "arguments": {"city": "Bo',
            ("", [("weather", '{"city": "Bo')]),
        ),
        (
            '<tool_call>{"name": "weather", "arguments": "{\\"a\\": 1}"}</tool_call>',
            ("", [("weather", '{"a": 1}')]),
        ),
    ],
    "llama3_json": [
        ("The weather is fine: {}", ("The weather is fine: {}", [])),
        (f'{{"name": "weather", "parameters": {ARGUMENTS}}}', ("", [("weather", ARGUMENTS)])),
        (
            f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {ARGUMENTS}}}; '
            '{"name": "time-of_day", "parameters": {}}',
            ("", [("weather", ARGUMENTS), ("time-of_day", "{}")]),
        ),
        ('{"answer": 42}', ('{"answer": 42}', [])),
        ('{"name": "weather", "parameters": 1}', ('{"name": "weather", "parameters": 1}', [])),
        (" <b>", (" <b>", [])),
    ],
    "mistral": [
        (
            f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}},'
            ' {"name": "time-of_day", "arguments": {}, "id": "x"}]',
            ("", [("weather", ARGUMENTS), ("time-of_day", "{}")]),
        ),
        (
            f"Hm.[TOOL_CALLS]weather{ARGUMENTS}[TOOL_CALLS]time-of_day[ARGS]{{}}",
            ("Hm.", [("weather", ARGUMENTS), ("time-of_day", "{}")]),
        ),
        ("[TOOL_CALLS]nobody{}", ("[TOOL_CALLS]nobody{}", [])),
        ("[TOOL] [1, 2]", ("[TOOL] [1, 2]", [])),
    ],
    "named": [(ARGUMENTS, ("", [("weather", ARGUMENTS)]))],
    "required": [
        (
            f'[{{"name": "weather", "parameters": {ARGUMENTS}}},'
            ' {"name": "time-of_day", "parameters": {}}]',
            ("", [("weather", ARGUMENTS), ("time-of_day", "{}")]),
        )
    ],
}
EVERY = [(form, text, expected) for form, cases in CASES.items() for text, expected in cases]


@pytest.mark.parametrize(("form", "text", "expected"), EVERY)
def test_every_format_is_parsed(form: str, text: str, expected: Read) -> None:
    assert read(form, [text]) == expected
    assert read(form, list(text)) == expected


def cut(text: str, places: list[int]) -> list[str]:
    ends = sorted({place % (len(text) + 1) for place in places} | {0, len(text)})
    return [text[start:end] for start, end in itertools.pairwise(ends)]


@given(st.sampled_from(EVERY), st.lists(st.integers(0, 500)))
def test_chunk_boundaries_make_no_difference(
    case: tuple[str, str, Read], places: list[int]
) -> None:
    form, text, expected = case
    assert read(form, cut(text, places)) == expected


FRAGMENTS = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "[TOOL_CALLS]",
        "<|python_tag|>",
        '{"name": ',
        '"weather"',
        ', "arguments": ',
        ', "parameters": ',
        "{",
        "}",
        "[",
        "]",
        '"',
        "\\",
        ";",
        " ",
        "\n",
        "x",
    ]
)


@given(
    st.sampled_from(sorted(CASES)),
    st.lists(FRAGMENTS, max_size=25).map("".join),
    st.lists(st.integers(0, 500)),
    st.booleans(),
)
def test_chunk_boundaries_make_no_difference_in_random_text(
    form: str, text: str, places: list[int], one_call: bool
) -> None:
    whole = read(form, [text], one_call=one_call)
    assert read(form, cut(text, places), one_call=one_call) == whole
    content, calls = whole
    if not calls:
        assert content == text


@given(
    st.sampled_from(["hermes", "llama3_json", "mistral", "required"]),
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.dictionaries(
                st.text(max_size=5),
                st.recursive(
                    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
                    lambda inner: st.lists(inner, max_size=3),
                    max_leaves=5,
                ),
                max_size=3,
            ),
        ),
        min_size=1,
        max_size=3,
    ),
)
def test_any_arguments_are_parsed(form: str, calls: list[tuple[str, dict[str, object]]]) -> None:
    texts = [json.dumps({"name": name, "arguments": arguments}) for name, arguments in calls]
    text = {
        "hermes": "".join(f"<tool_call>\n{text}\n</tool_call>\n" for text in texts),
        "llama3_json": "; ".join(texts),
        "mistral": f"[TOOL_CALLS][{', '.join(texts)}]",
        "required": f"[{', '.join(texts)}]",
    }[form]
    content, parsed = read(form, list(text))
    assert content == ""
    assert [(name, json.loads(arguments)) for name, arguments in parsed] == calls


def test_one_call_drops_the_calls_after_the_first() -> None:
    text = '[{"name": "weather", "parameters": {"a": 1}}, {"name": "weather", "parameters": {}}]'
    assert read("required", [text], one_call=True) == ("", [("weather", '{"a": 1}')])


class Counted(str):
    """A string that counts the characters copied when other strings are made from it."""

    copied = 0

    def __add__(self, other: str) -> "Counted":
        return Counted.of(str(self) + str(other))

    def __radd__(self, other: str) -> "Counted":
        return Counted.of(str(other) + str(self))

    def __getitem__(self, key: SupportsIndex | slice) -> "Counted":
        return Counted.of(str(self)[key])

    def __iter__(self) -> Iterator[str]:
        return map(Counted, str(self))

    def strip(self, chars: str | None = None) -> "Counted":
        return Counted.of(str(self).strip(chars))

    def lstrip(self, chars: str | None = None) -> "Counted":
        return Counted.of(str(self).lstrip(chars))

    @classmethod
    def of(cls, text: str) -> "Counted":
        cls.copied += len(text)
        return cls(text)


LONG = "a" * 5000
HELD = {
    "hermes": [
        f"{LONG} <tool_" * 3,
        f'<tool_call>{{"other": "{LONG}',
        f'<tool_call>{{"{LONG}": 1, "name": "weather", "arguments": {{}}}}</tool_call>',
        f'<tool_call>{{"arguments": {{"a": "{LONG}"}}, "name": "weather"}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": {{"a": "{LONG}"}}}}</tool_call>',
        f'<tool_call>{{"name": "weather", "arguments": "{LONG}"}}</tool_call>',
        f'<tool_call>{{"name": "weather", "other": {LONG}',
        f'<tool_call>{{"name": "weather"}}</tool_call>{" " * 5000}x',
        f"<tool_call>{{{' ' * 5000}",
    ],
    "llama3_json": [f'{{"other": ["{LONG}', f"{' ' * 5000}{{", LONG],
    "mistral": [f"[TOOL_CALLS]weather{{{LONG}", f"[TOOL_CALLS]{LONG}", "[TOOL_" * 900],
    "named": [LONG],
    "required": [f'[{{"other": "{LONG}', LONG],
}


@pytest.mark.parametrize(("form", "text"), [(f, text) for f, all_ in HELD.items() for text in all_])
@pytest.mark.parametrize("size", [1, 1 << 20])
def test_held_text_is_copied_a_bounded_number_of_times(form: str, text: str, size: int) -> None:
    parser = ToolParser(form, NAMES)
    Counted.copied = 0
    for start in range(0, len(text), size):
        parser.feed(Counted(text[start : start + size]))
    parser.end()
    assert Counted.copied < 20 * len(text)
