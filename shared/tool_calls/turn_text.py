"""Text of one turn of a response, divided into content and calls as it arrives. Pure."""

from collections.abc import Sequence

from shared.protocol.requests import FunctionCall
from shared.tool_calls.parser import ToolParser
from shared.tool_calls.scanner import Call, Content, Piece


class TurnText:
    """Content and calls so far.

    Space counts as content only next to other content, or if there is nothing else.
    """

    def __init__(self, form: str | None, names: Sequence[str], *, one_call: bool = False) -> None:
        """See `ToolParser`. Without a `form`, all text is content."""
        self._parser = None if form is None else ToolParser(form, names, one_call=one_call)
        self._space = ""
        self._content: list[str] = []
        self._calls: list[tuple[str, list[str]]] = []
        self.num_before = 0
        """Number of calls before the content."""

    def feed(self, text: str, *, is_last: bool = False) -> list[Piece]:
        """Return the pieces that `text` adds, in order."""
        if self._parser is None:
            return self._add(Content(text))
        pieces = self._parser.feed(text) + (self._parser.end() if is_last else [])
        return [new for piece in pieces for new in self._add(piece)]

    def _add(self, piece: Piece) -> list[Piece]:
        if isinstance(piece, Call):
            if piece.name is not None:
                self._calls.append((piece.name, []))
            self._calls[piece.index][1].append(piece.arguments)
            return [piece]
        text = piece.text
        if not self._content:
            text = self._space + text
            if not text.strip() and self._parser is not None:
                self._space = text
                return []
            self.num_before = len(self._calls)
        if not text:
            return []
        self._content.append(text)
        return [Content(text)]

    @property
    def content(self) -> str:
        return "".join(self._content) if self._content or self._calls else self._space

    @property
    def calls(self) -> list[FunctionCall]:
        return [FunctionCall(name, "".join(texts)) for name, texts in self._calls]
