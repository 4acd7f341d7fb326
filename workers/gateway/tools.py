"""Calls of tools in an answer's text, found as the text arrives. Pure.

An answer is read character by character, so how it was cut on its way makes no difference. A call
is told as soon as its function's name is known; what was taken for the beginning of a call, and is
none, is content like everything else. Nothing is ever evaluated.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Literal

Form = Literal["hermes", "llama3_json", "mistral", "named", "required"]


# With what surrounds it.
MAX_NAME_LEN = 80


@dataclass(slots=True)
class Content:
    text: str


@dataclass(slots=True)
class Call:
    """`arguments` are as much of them as has come; later pieces of the same index have more."""

    index: int
    name: str | None
    arguments: str


Piece = Content | Call

# A parser is sent a character at a time.
_Reading = Generator[None, str, None]
_Read = Generator[None, str, str]


class _NoCall(Exception):
    """This is not the form of a call. `next` is the character that it was not."""


@dataclass(slots=True)
class _Call:
    """A call being read: an object with a name and arguments, in either order."""

    name: str | None = None
    told: bool = False
    early: str = ""
    """Arguments that came before the name."""


class ToolParser:
    """One choice of an answer."""

    def __init__(self, form: str, names: Sequence[str], *, one: bool = False) -> None:
        """`names` are those of the functions that were offered; `one`: only the first call counts,
        and what is called after it is left out."""
        self._names = frozenset(names)
        self._one = one
        self._pieces: list[Piece] = []
        self._held = ""
        """Read, and not known yet to be content or a call."""
        self._num_calls = 0
        self._only_name = names[0] if form == "named" else ""
        self._reading = _FORMS[form](self)
        next(self._reading)

    @property
    def has_calls(self) -> bool:
        return self._num_calls > 0

    def feed(self, text: str) -> list[Piece]:
        for character in text:
            self._reading.send(character)
        return self._taken()

    def end(self) -> list[Piece]:
        """The text is over: what was held back for what might have followed is content."""
        self._reading.close()
        if self._held.strip() or not self._num_calls:
            self._content(self._held)
        self._held = ""
        return self._taken()

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return pieces

    # -- telling --------------------------------------------------------------------------------

    def _content(self, text: str) -> None:
        if not text:
            return
        last = self._pieces[-1] if self._pieces else None
        if isinstance(last, Content):
            last.text += text
        else:
            self._pieces.append(Content(text))

    def _release(self) -> None:
        """What is held is content."""
        self._content(self._held)
        self._held = ""

    def _start(self, name: str) -> None:
        self._held = ""
        self._num_calls += 1
        if not (self._one and self._num_calls > 1):
            self._pieces.append(Call(self._num_calls - 1, name, ""))

    def _arguments(self, text: str) -> None:
        if not text or (self._one and self._num_calls > 1):
            return
        index, last = self._num_calls - 1, self._pieces[-1] if self._pieces else None
        if isinstance(last, Call) and last.index == index:
            last.arguments += text
        else:
            self._pieces.append(Call(index, None, text))

    # -- reading --------------------------------------------------------------------------------

    def _next(self) -> _Read:
        """One more character, which is held."""
        character = yield
        self._held += character
        return character

    def _after_space(self) -> _Read:
        while True:
            character = yield from self._next()
            if not character.isspace():
                return character

    def _expect(self, wanted: str, character: str) -> None:
        if character != wanted:
            raise _NoCall

    def _string(self) -> _Read:
        """After its opening quote: what it means."""
        raw = '"'
        while True:
            character = yield from self._next()
            raw += character
            if character == "\\":
                raw += yield from self._next()
            elif character == '"':
                try:
                    return str(json.loads(raw, strict=False))
                except ValueError:
                    raise _NoCall from None

    def _value(self, character: str, call: _Call | None) -> _Read:
        """The JSON value that begins with `character`, to its end. Arguments of a call that has
        been told are told at once; returns the character after a bare word, else none."""
        if character == '"':
            text = yield from self._string()
            if call is not None:
                self._give(call, text)  # JSON in a string: some write it so.
            return ""
        if character in "{[":
            yield from self._nested(character, call)
            return ""
        while character not in ",}]" and not character.isspace():
            character = yield from self._next()
        return character

    def _nested(self, character: str, call: _Call | None) -> _Reading:
        depth, in_string, escaped = 0, False, False
        while True:
            if call is not None:
                self._give(call, character)
            if in_string:
                in_string = escaped or character != '"'
                escaped = character == "\\" and not escaped
            elif character == '"':
                in_string = True
            elif character in "{[":
                depth += 1
            elif character in "}]":
                depth -= 1
                if depth == 0:
                    return
            character = yield from self._next()

    def _give(self, call: _Call, text: str) -> None:
        if call.told:
            self._held = ""
            self._arguments(text)
        else:
            call.early += text

    def _object(self) -> _Reading:
        """After its opening brace. Raises _NoCall where it is no call that was offered."""
        call = _Call()
        character = yield from self._after_space()
        while character != "}":
            self._expect('"', character)
            key = yield from self._string()
            self._expect(":", (yield from self._after_space()))
            character = yield from self._after_space()
            if key == "name" and call.name is None:
                self._expect('"', character)
                call.name = yield from self._string()
                if call.name not in self._names:
                    raise _NoCall
                after = ""
            elif key in ("arguments", "parameters"):
                if character not in '{"':
                    raise _NoCall
                self._tell(call)
                after = yield from self._value(character, call)
            else:
                after = yield from self._value(character, None)
            character = after if after and not after.isspace() else (yield from self._after_space())
            if character == ",":
                character = yield from self._after_space()
                self._expect('"', character)
            elif character != "}":
                raise _NoCall
        self._close(call)

    def _tell(self, call: _Call) -> None:
        if call.name is not None and not call.told:
            call.told = True
            self._start(call.name)

    def _close(self, call: _Call) -> None:
        if call.name is None:
            raise _NoCall
        if not call.told:
            self._tell(call)
            self._arguments(call.early or "{}")
        self._held = ""

    # -- forms ----------------------------------------------------------------------------------

    def _rest(self) -> _Reading:
        """All else is content."""
        self._release()
        while True:
            self._content((yield))

    def _until(self, sign: str) -> _Reading:
        """Content up to `sign`, which is held; space after a call waits for what follows it."""
        while True:
            yield from self._next()
            while self._held and not sign.startswith(self._held):
                blank = self._num_calls > 0 and not self._held.strip()
                if blank or (self._num_calls and sign.startswith(self._held.lstrip())):
                    break
                self._content(self._held[0])
                self._held = self._held[1:]
            if self._held.endswith(sign):
                return

    def _hermes(self) -> _Reading:
        """`<tool_call>{...}</tool_call>`, any number of them, with content around."""
        while True:
            yield from self._until("<tool_call>")
            try:
                self._expect("{", (yield from self._after_space()))
                yield from self._object()
                for wanted in "</tool_call>":
                    first = wanted == "<"
                    character = yield from (self._after_space() if first else self._next())
                    self._expect(wanted, character)
                self._held = ""
            except _NoCall:
                self._release()

    def _llama3_json(self) -> _Reading:
        """The whole answer is calls, with semicolons between."""
        sign = "<|python_tag|>"
        character = yield from self._after_space()
        if character == "<":
            for wanted in sign[1:]:
                if (yield from self._next()) != wanted:
                    yield from self._rest()
            character = yield from self._after_space()
        try:
            while True:
                self._expect("{", character)
                yield from self._object()
                self._expect(";", (yield from self._after_space()))
                character = yield from self._after_space()
        except _NoCall:
            yield from self._rest()

    def _mistral(self) -> _Reading:
        """`[TOOL_CALLS]`, and then a list of calls, or each call's name before its arguments."""
        yield from self._until("[TOOL_CALLS]")
        try:
            character = yield from self._after_space()
            if character == "[":
                yield from self._list()
            else:
                yield from self._named_calls(character)
        except _NoCall:
            pass
        yield from self._rest()

    def _list(self) -> _Reading:
        """After its opening bracket."""
        while True:
            self._expect("{", (yield from self._after_space()))
            yield from self._object()
            character = yield from self._after_space()
            if character == "]":
                self._held = ""
                return
            self._expect(",", character)

    def _named_calls(self, character: str) -> _Reading:
        while True:
            name = ""
            while character != "{" and not name.endswith("[ARGS]"):
                if len(name) > MAX_NAME_LEN:
                    raise _NoCall
                name += character
                character = yield from self._next()
            if name.endswith("[ARGS]") and character.isspace():
                character = yield from self._after_space()
            name = name.removesuffix("[ARGS]").strip()
            if name not in self._names or character != "{":
                raise _NoCall
            self._start(name)
            yield from self._nested(character, _Call(name, told=True))
            for wanted in "[TOOL_CALLS]":
                first = wanted == "["
                self._expect(wanted, (yield from (self._after_space() if first else self._next())))
            character = yield from self._after_space()

    def _named(self) -> _Reading:
        """The whole answer is one function's arguments."""
        character = yield from self._after_space()
        self._start(self._only_name)
        while True:
            self._arguments(character)
            character = yield

    def _required(self) -> _Reading:
        """The whole answer is a list of calls."""
        try:
            self._expect("[", (yield from self._after_space()))
            yield from self._list()
        except _NoCall:
            pass
        yield from self._rest()


_FORMS = {
    "hermes": ToolParser._hermes,
    "llama3_json": ToolParser._llama3_json,
    "mistral": ToolParser._mistral,
    "named": ToolParser._named,
    "required": ToolParser._required,
}
