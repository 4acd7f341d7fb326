"""Streaming parser for tool calls in the text of an answer, in the formats of several models. Pure.

The text is read character by character, so its division into chunks makes no difference. A call is
returned as soon as the name of its function is complete. Text that only looks like the beginning of
a call becomes content. Nothing is evaluated.
"""

from collections.abc import Sequence
from typing import Literal

from shared.tool_calls.scanner import CallReader, NoCall, Piece, Reading

Form = Literal["hermes", "llama3_json", "mistral", "named", "required"]

# Limit on a name together with its delimiters.
MAX_NAME_LEN = 80


class ToolParser:
    """Parser for one choice of an answer."""

    def __init__(self, form: str, names: Sequence[str], *, one_call: bool = False) -> None:
        """`names` are the names of the offered functions.

        With `one_call`, all calls after the first one are omitted.
        """
        self._reader = CallReader(names, one_call=one_call)
        self._reading = _FORMS[form](self._reader)
        next(self._reading)

    def feed(self, text: str) -> list[Piece]:
        """Return the content and calls that are complete with this text."""
        for character in text:
            self._reading.send(character)
        return self._reader.pop_pieces()

    def end(self) -> list[Piece]:
        """Return the held text, at the end of the answer."""
        self._reading.close()
        self._reader.end()
        return self._reader.pop_pieces()


def _rest(reader: CallReader) -> Reading:
    """Read the rest of the text as content."""
    reader.release()
    while True:
        reader.content((yield))


def _hermes(reader: CallReader) -> Reading:
    """Read any number of `<tool_call>{...}</tool_call>`, with content around them."""
    while True:
        yield from reader.until("<tool_call>")
        try:
            reader.expect("{", (yield from reader.after_space()))
            yield from reader.call()
            yield from _tag(reader, "</tool_call>")
            reader.drop()
        except NoCall:
            reader.release()


def _llama3_json(reader: CallReader) -> Reading:
    """Read an answer that consists of calls, with semicolons between them."""
    try:
        character = yield from reader.after_space()
        if character == "<":
            for expected in "|python_tag|>":
                reader.expect(expected, (yield from reader.next_char()))
            character = yield from reader.after_space()
        while True:
            reader.expect("{", character)
            yield from reader.call()
            reader.expect(";", (yield from reader.after_space()))
            character = yield from reader.after_space()
    except NoCall:
        yield from _rest(reader)


def _mistral(reader: CallReader) -> Reading:
    """Read `[TOOL_CALLS]`, and then a list of calls, or the name of each call and its arguments."""
    yield from reader.until("[TOOL_CALLS]")
    try:
        character = yield from reader.after_space()
        if character == "[":
            yield from reader.calls()
        else:
            yield from _named_calls(reader, character)
    except NoCall:
        pass
    yield from _rest(reader)


def _named_calls(reader: CallReader, character: str) -> Reading:
    while True:
        name = ""
        while character != "{" and not name.endswith("[ARGS]"):
            if len(name) > MAX_NAME_LEN:
                raise NoCall
            name += character
            character = yield from reader.next_char()
        if name.endswith("[ARGS]") and character.isspace():
            character = yield from reader.after_space()
        yield from reader.named_call(name.removesuffix("[ARGS]").strip(), character)
        yield from _tag(reader, "[TOOL_CALLS]")
        character = yield from reader.after_space()


def _tag(reader: CallReader, tag: str) -> Reading:
    """Read a tag, with space before it. Raises NoCall for other text."""
    reader.expect(tag[0], (yield from reader.after_space()))
    for expected in tag[1:]:
        reader.expect(expected, (yield from reader.next_char()))


def _named(reader: CallReader) -> Reading:
    """Read an answer that consists of the arguments of one function."""
    character = yield from reader.after_space()
    reader.start(reader.names[0])
    while True:
        reader.arguments(character)
        character = yield


def _required(reader: CallReader) -> Reading:
    """Read an answer that consists of a list of calls."""
    try:
        reader.expect("[", (yield from reader.after_space()))
        yield from reader.calls()
    except NoCall:
        pass
    yield from _rest(reader)


_FORMS = {
    "hermes": _hermes,
    "llama3_json": _llama3_json,
    "mistral": _mistral,
    "named": _named,
    "required": _required,
}
