"""A terminal in memory."""

import io


class FakeTerminal(io.StringIO):
    def isatty(self) -> bool:
        return True
