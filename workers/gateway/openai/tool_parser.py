"""Calls of tools in an answer's text, found as the text arrives: the forms of models. Pure.

An answer is read character by character, so how it was cut on its way makes no difference. A call
is told as soon as its function's name is known; what was taken for the beginning of a call, and is
none, is content like everything else. Nothing is ever evaluated.
"""

from collections.abc import Sequence
from typing import Literal

from workers.gateway.openai.tool_scanner import CallReader, NoCall, Piece, Reading

Form = Literal["hermes", "llama3_json", "mistral", "named", "required"]


# With what surrounds it.
MAX_NAME_LEN = 80


class ToolParser:
    """One choice of an answer."""

    def __init__(self, form: str, names: Sequence[str], *, one: bool = False) -> None:
        """`names` are those of the functions that were offered; `one`: only the first call counts,
        and what is called after it is left out."""
        self._reader = CallReader(names, one=one)
        self._reading = _FORMS[form](self._reader)
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        return self._reader.num_calls > 0

    def feed(self, text: str) -> list[Piece]:
        for character in text:
            self._reading.send(character)
        return self._reader.taken()

    def end(self) -> list[Piece]:
        """The text is over: what was held back for what might have followed is content."""
        self._reading.close()
        self._reader.end()
        return self._reader.taken()


def _rest(reader: CallReader) -> Reading:
    """All else is content."""
    reader.release()
    while True:
        reader.content((yield))


def _hermes(reader: CallReader) -> Reading:
    """`<tool_call>{...}</tool_call>`, any number of them, with content around."""
    while True:
        yield from reader.until("<tool_call>")
        try:
            reader.expect("{", (yield from reader.after_space()))
            yield from reader.call()
            yield from _sign(reader, "</tool_call>")
            reader.drop()
        except NoCall:
            reader.release()


def _llama3_json(reader: CallReader) -> Reading:
    """The whole answer is calls, with semicolons between."""
    sign = "<|python_tag|>"
    character = yield from reader.after_space()
    if character == "<":
        for wanted in sign[1:]:
            if (yield from reader.take()) != wanted:
                yield from _rest(reader)
        character = yield from reader.after_space()
    try:
        while True:
            reader.expect("{", character)
            yield from reader.call()
            reader.expect(";", (yield from reader.after_space()))
            character = yield from reader.after_space()
    except NoCall:
        yield from _rest(reader)


def _mistral(reader: CallReader) -> Reading:
    """`[TOOL_CALLS]`, and then a list of calls, or each call's name before its arguments."""
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
            character = yield from reader.take()
        if name.endswith("[ARGS]") and character.isspace():
            character = yield from reader.after_space()
        yield from reader.named_call(name.removesuffix("[ARGS]").strip(), character)
        yield from _sign(reader, "[TOOL_CALLS]")
        character = yield from reader.after_space()


def _sign(reader: CallReader, sign: str) -> Reading:
    """After space."""
    reader.expect(sign[0], (yield from reader.after_space()))
    for wanted in sign[1:]:
        reader.expect(wanted, (yield from reader.take()))


def _named(reader: CallReader) -> Reading:
    """The whole answer is one function's arguments."""
    character = yield from reader.after_space()
    reader.start(reader.names[0])
    while True:
        reader.arguments(character)
        character = yield


def _required(reader: CallReader) -> Reading:
    """The whole answer is a list of calls."""
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
