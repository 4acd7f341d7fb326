"""Character scanner for text that may contain tool calls. Pure.

The scanner holds text until it is either content or a call, reads the JSON object of a call, and
collects the pieces. Each character is read once and copied a limited number of times, for any
amount of held text: texts are lists of pieces until they are returned.
"""

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field


@dataclass(slots=True)
class Content:
    """Text outside of calls."""

    text: str


@dataclass(slots=True)
class Call:
    """Part of a call: its first arguments with the name, or further arguments without a name."""

    index: int
    name: str | None
    arguments: str


Piece = Content | Call

# A reader is a generator that receives one character at a time.
Reading = Generator[None, str, None]
Read = Generator[None, str, str]


class NoCall(Exception):
    """Raised for text that does not have the form of a call."""


@dataclass(slots=True)
class _Call:
    """Call being read: an object with a name and arguments, in either order."""

    name: str | None = None
    is_started: bool = False
    early: list[str] = field(default_factory=list)
    """Arguments before the name."""


class CallReader:
    """State of the scanner, and the readers for the common parts of all formats."""

    def __init__(self, names: Sequence[str], *, one_call: bool) -> None:
        """See `ToolParser` for the parameters."""
        self.names = names
        self.num_calls = 0
        self._one_call = one_call
        self._held: list[str] = []
        """Read text that is not yet decided to be content or a call."""
        self._pieces: list[tuple[int | None, str | None, list[str]]] = []
        """Call index (None for content), function name, and text."""

    # -- output ---------------------------------------------------------------------------------

    def pop_pieces(self) -> list[Piece]:
        """Return the new pieces since the last call of this method."""
        pieces, self._pieces = self._pieces, []
        return [
            Content("".join(texts)) if index is None else Call(index, name, "".join(texts))
            for index, name, texts in pieces
        ]

    def content(self, text: str) -> None:
        if text:
            self._append(None, text)

    def release(self, but: int = 0) -> None:
        """Make the held text content, except for the last `but` characters."""
        end = len(self._held) - but
        self.content("".join(self._held[:end]))
        self._held = self._held[end:]

    def drop(self) -> None:
        """Discard the held text after it was parsed."""
        self._held.clear()

    def end(self) -> None:
        """Make the held text content, except for space after the last call."""
        if self.num_calls and not "".join(self._held).strip():
            self.drop()
        self.release()

    def start(self, name: str) -> None:
        """Begin the next call."""
        self.drop()
        self.num_calls += 1
        if self._counts:
            self._pieces.append((self.num_calls - 1, name, []))

    def arguments(self, text: str) -> None:
        """Add to the arguments of the current call."""
        if text and self._counts:
            self._append(self.num_calls - 1, text)

    @property
    def _counts(self) -> bool:
        return not (self._one_call and self.num_calls > 1)

    def _append(self, index: int | None, text: str) -> None:
        if not self._pieces or self._pieces[-1][0] != index:
            self._pieces.append((index, None, []))
        self._pieces[-1][2].append(text)

    # -- reading --------------------------------------------------------------------------------

    def next_char(self) -> Read:
        """Read and hold one more character."""
        character = yield
        self._held.append(character)
        return character

    def after_space(self) -> Read:
        """Read up to the first character that is not space."""
        while True:
            character = yield from self.next_char()
            if not character.isspace():
                return character

    def expect(self, expected: str, character: str) -> None:
        if character != expected:
            raise NoCall

    def until(self, tag: str) -> Reading:
        """Read content up to `tag`, and hold the tag. Space after a call waits for more text."""
        begun = ""
        while begun != tag:
            character = yield from self.next_char()
            waits = self.num_calls > 0 and character.isspace()
            if waits and not begun:
                continue
            begun += character
            if not tag.startswith(begun):
                begun = _overlap(tag, begun)
                self.release(1 if waits else len(begun))

    def call(self) -> Reading:
        """Read a call after its opening brace. Raises NoCall if its function was not offered."""
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
        self._end_call(call)

    def calls(self) -> Reading:
        """Read a list of calls after its opening bracket."""
        while True:
            self.expect("{", (yield from self.after_space()))
            yield from self.call()
            character = yield from self.after_space()
            if character == "]":
                self.drop()
                return
            self.expect(",", character)

    def named_call(self, name: str, character: str) -> Reading:
        """Read the arguments of a call with a known name. They begin with `character`."""
        if name not in self.names or character != "{":
            raise NoCall
        self.start(name)
        yield from self._nested(character, _Call(name, is_started=True))

    def _member(self, key: str, character: str, call: _Call) -> Read:
        """Read the value of a member. Returns the character after a bare word, else ""."""
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
        self._start_call(call)
        return (yield from self._value(character, call))

    def _string(self) -> Read:
        """Read a string after its opening quote. Returns its value."""
        raw = ['"']
        while raw[-1] != '"' or len(raw) == 1:
            raw.append((yield from self.next_char()))
            if raw[-1] == "\\":
                raw[-1] += yield from self.next_char()
        try:
            return str(json.loads("".join(raw), strict=False))
        except ValueError:
            raise NoCall from None

    def _value(self, character: str, call: _Call | None) -> Read:
        """Read the JSON value that begins with `character`, and add it to the call's arguments.

        Returns the character after a bare word, else "".
        """
        if character == '"':
            text = yield from self._string()
            if call is not None:
                self._add_arguments(call, text)  # Some models write the JSON in a string.
            return ""
        if character in "{[":
            yield from self._nested(character, call)
            return ""
        while character not in ",}]" and not character.isspace():
            character = yield from self.next_char()
        return character

    def _nested(self, character: str, call: _Call | None) -> Reading:
        depth, in_string, escaped = 0, False, False
        while True:
            if call is not None:
                self._add_arguments(call, character)
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
            character = yield from self.next_char()

    def _add_arguments(self, call: _Call, text: str) -> None:
        if call.is_started:
            self.drop()
            self.arguments(text)
        else:
            call.early.append(text)

    def _start_call(self, call: _Call) -> None:
        if call.name is not None and not call.is_started:
            call.is_started = True
            self.start(call.name)

    def _end_call(self, call: _Call) -> None:
        if call.name is None:
            raise NoCall
        if not call.is_started:
            self._start_call(call)
            self.arguments("".join(call.early) or "{}")
        self.drop()


def _overlap(tag: str, text: str) -> str:
    """Return the longest suffix of `text` that is a prefix of `tag`."""
    return next(text[i:] for i in range(len(text) + 1) if tag.startswith(text[i:]))
