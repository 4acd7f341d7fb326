"""Reading of a text character by character, where calls of tools may be in it: what is held until
it is known what it is, the JSON object of a call, and what is told. Pure.

Every character is looked at once and copied a bounded number of times, however much is held:
texts are lists of pieces until they are told.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field


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

# A reader is sent a character at a time.
Reading = Generator[None, str, None]
Read = Generator[None, str, str]


class NoCall(Exception):
    """This is not the form of a call."""


@dataclass(slots=True)
class _Call:
    """A call being read: an object with a name and arguments, in either order."""

    name: str | None = None
    told: bool = False
    early: list[str] = field(default_factory=list)
    """Arguments that came before the name."""


class CallReader:
    def __init__(self, names: Sequence[str], *, one: bool) -> None:
        """As of a `ToolParser`."""
        self.names = names
        self.num_calls = 0
        self._one = one
        self._held: list[str] = []
        """Read, and not known yet to be content or a call."""
        self._told: list[tuple[int | None, str | None, list[str]]] = []
        """A call's index, or None of content; its function's name; and its text."""

    # -- telling --------------------------------------------------------------------------------

    def taken(self) -> list[Piece]:
        """What has been told since the last time."""
        told, self._told = self._told, []
        return [
            Content("".join(texts)) if index is None else Call(index, name, "".join(texts))
            for index, name, texts in told
        ]

    def content(self, text: str) -> None:
        if text:
            self._tell(None, text)

    def release(self, but: int = 0) -> None:
        """What is held is content, but for so many characters at its end."""
        end = len(self._held) - but
        self.content("".join(self._held[:end]))
        self._held = self._held[end:]

    def drop(self) -> None:
        """What is held has been understood."""
        self._held.clear()

    def end(self) -> None:
        """What was held for what might have followed is content."""
        if self.num_calls and not "".join(self._held).strip():
            self.drop()
        self.release()

    def start(self, name: str) -> None:
        self.drop()
        self.num_calls += 1
        if self._counts:
            self._told.append((self.num_calls - 1, name, []))

    def arguments(self, text: str) -> None:
        if text and self._counts:
            self._tell(self.num_calls - 1, text)

    @property
    def _counts(self) -> bool:
        return not (self._one and self.num_calls > 1)

    def _tell(self, index: int | None, text: str) -> None:
        if not self._told or self._told[-1][0] != index:
            self._told.append((index, None, []))
        self._told[-1][2].append(text)

    # -- reading --------------------------------------------------------------------------------

    def take(self) -> Read:
        """One more character, which is held."""
        character = yield
        self._held.append(character)
        return character

    def after_space(self) -> Read:
        while True:
            character = yield from self.take()
            if not character.isspace():
                return character

    def expect(self, wanted: str, character: str) -> None:
        if character != wanted:
            raise NoCall

    def until(self, sign: str) -> Reading:
        """Content up to `sign`, which is held; space after a call waits for what follows it."""
        begun = ""
        while begun != sign:
            character = yield from self.take()
            waits = self.num_calls > 0 and character.isspace()
            if waits and not begun:
                continue
            begun += character
            if not sign.startswith(begun):
                begun = _beginning(sign, begun)
                self.release(1 if waits else len(begun))

    def call(self) -> Reading:
        """After its opening brace. Raises NoCall where it is no call that was offered."""
        call = _Call()
        character = yield from self.after_space()
        while character != "}":
            self.expect('"', character)
            key = yield from self._string()
            self.expect(":", (yield from self.after_space()))
            after = yield from self._member(key, (yield from self.after_space()), call)
            character = after if after and not after.isspace() else (yield from self.after_space())
            if character == ",":
                character = yield from self.after_space()
                self.expect('"', character)
            elif character != "}":
                raise NoCall
        self._close(call)

    def calls(self) -> Reading:
        """Of calls, after its opening bracket."""
        while True:
            self.expect("{", (yield from self.after_space()))
            yield from self.call()
            character = yield from self.after_space()
            if character == "]":
                self.drop()
                return
            self.expect(",", character)

    def named_call(self, name: str, character: str) -> Reading:
        """A call whose name has come before its arguments, which begin with `character`."""
        if name not in self.names or character != "{":
            raise NoCall
        self.start(name)
        yield from self._nested(character, _Call(name, told=True))

    def _member(self, key: str, character: str, call: _Call) -> Read:
        """The character after a bare word, else none."""
        if key == "name" and call.name is None:
            self.expect('"', character)
            call.name = yield from self._string()
            if call.name not in self.names:
                raise NoCall
            return ""
        if key not in ("arguments", "parameters"):
            return (yield from self._value(character, None))
        if character not in '{"':
            raise NoCall
        self._begin(call)
        return (yield from self._value(character, call))

    def _string(self) -> Read:
        """After its opening quote: what it means."""
        raw = ['"']
        while raw[-1] != '"' or len(raw) == 1:
            raw.append((yield from self.take()))
            if raw[-1] == "\\":
                raw[-1] += yield from self.take()
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise NoCall from None

    def _value(self, character: str, call: _Call | None) -> Read:
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
            character = yield from self.take()
        return character

    def _nested(self, character: str, call: _Call | None) -> Reading:
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
            character = yield from self.take()

    def _give(self, call: _Call, text: str) -> None:
        if call.told:
            self.drop()
            self.arguments(text)
        else:
            call.early.append(text)

    def _begin(self, call: _Call) -> None:
        if call.name is not None and not call.told:
            call.told = True
            self.start(call.name)

    def _close(self, call: _Call) -> None:
        if call.name is None:
            raise NoCall
        if not call.told:
            self._begin(call)
            self.arguments("".join(call.early) or "{}")
        self.drop()


def _beginning(sign: str, text: str) -> str:
    """The longest end of `text` that `sign` begins with."""
    return next(text[i:] for i in range(len(text) + 1) if sign.startswith(text[i:]))
