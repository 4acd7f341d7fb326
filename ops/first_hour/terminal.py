"""A shell on a pseudo-terminal, a record of its output, and the lines on its screen."""

import contextlib
import fcntl
import os
import pty
import re
import select
import signal
import struct
import termios
import time
from pathlib import Path
from typing import NamedTuple

WIDTH, HEIGHT = 100, 40
# The shell prints the exit code of each command in a sequence that no terminal shows.
DONE = re.compile(r"\x1b]777;(\d+)\x07")
PROMPT = {"PS1": r"$ \e]777;$?\a"}
SHELL = ["bash", "--norc", "--noprofile", "--noediting", "-i"]

_TOKENS = re.compile(
    r"\x1b\[(?P<arguments>[?>\d;]*)(?P<action>[A-Za-z])"
    r"|\x1b][^\x07]*\x07|\x1b[()].|\x1b[^\[\]()]"
    r"|(?P<text>[^\x1b\x00-\x1f]+)|(?P<control>[\x00-\x1f])"
)


class Chunk(NamedTuple):
    """Bytes that the terminal printed at once, and when, in seconds since the shell's start."""

    at_s: float
    text: str


class TerminalTimeout(Exception):
    """The expected output was not printed in time."""


class Terminal:
    """An interactive shell; everything that it prints is recorded."""

    def __init__(self, folder: Path, env: dict[str, str]) -> None:
        self.chunks: list[Chunk] = []
        self._began = time.monotonic()
        self._process, self._screen = pty.fork()
        if self._process == 0:
            os.chdir(folder)
            os.execve("/bin/bash", SHELL, env | PROMPT)
        size = struct.pack("HHHH", HEIGHT, WIDTH, 0, 0)
        fcntl.ioctl(self._screen, termios.TIOCSWINSZ, size)

    def type(self, text: str) -> None:
        os.write(self._screen, text.encode())

    def wait_for(self, pattern: re.Pattern[str], timeout_s: float) -> tuple[str, re.Match[str]]:
        """Return the output until `pattern` matches, and the match."""
        deadline = time.monotonic() + timeout_s
        output = ""
        while (match := pattern.search(output)) is None:
            left_s = deadline - time.monotonic()
            if left_s <= 0 or not select.select([self._screen], [], [], left_s)[0]:
                raise TerminalTimeout(f"{timeout_s:.0f} s without {pattern.pattern!r}:\n{output}")
            try:
                text = os.read(self._screen, 1 << 16).decode(errors="replace")
            except OSError as error:
                raise TerminalTimeout(f"the shell has ended:\n{output}") from error
            self.chunks.append(Chunk(time.monotonic() - self._began, text))
            output += text
        return output, match

    def close(self) -> None:
        """End the shell and all of its jobs."""
        for file in Path("/proc").glob("[0-9]*/stat"):
            # A process may end meanwhile.
            with contextlib.suppress(OSError):
                session = file.read_text().rpartition(")")[2].split()[3]
                if int(session) == self._process:
                    os.kill(int(file.parent.name), signal.SIGKILL)
        os.close(self._screen)
        os.waitpid(self._process, 0)


class Screen:
    """The lines of a terminal without an end, for the sequences that pip, uv and rich print."""

    def __init__(self) -> None:
        self.lines: list[list[tuple[str, str]]] = [[]]
        """Each cell has its style, as a sequence, and its character."""
        self._row = 0
        self._column = 0
        self._style = ""

    def feed(self, text: str) -> None:
        for token in _TOKENS.finditer(text):
            if token["text"]:
                for character in token["text"]:
                    self._put(character)
            elif token["control"]:
                self._control(token["control"])
            elif token["action"] and token["arguments"][:1] not in ("?", ">"):
                self._act(token["action"], token["arguments"])

    def text(self) -> list[str]:
        """Return the lines with the sequences of their styles."""
        return [_joined(line) for line in self.lines]

    def _put(self, character: str) -> None:
        if self._column >= WIDTH:
            self._control("\n")
            self._column = 0
        line = self.lines[self._row]
        line += [("", " ")] * (self._column + 1 - len(line))
        line[self._column] = (self._style, character)
        self._column += 1

    def _control(self, character: str) -> None:
        if character == "\r":
            self._column = 0
        elif character == "\b":
            self._column = max(0, self._column - 1)
        elif character == "\n":
            self._row += 1
            if self._row == len(self.lines):
                self.lines.append([])

    def _act(self, action: str, arguments: str) -> None:
        number = int(arguments.partition(";")[0] or 0)
        if action == "m":
            reset = arguments in ("", "0")
            self._style = "" if reset else f"{self._style}\x1b[{arguments}m"
        elif action == "A":
            self._row = max(0, self._row - max(1, number))
        elif action == "B":
            self._row = min(len(self.lines) - 1, self._row + max(1, number))
        elif action in "CDG":
            moved = {"C": self._column + max(1, number), "D": self._column - max(1, number)}
            self._column = max(0, moved.get(action, number - 1))
        elif action == "K":
            line = self.lines[self._row]
            del line[0 if number == 2 else self._column :]
        elif action == "J" and number == 0:
            del self.lines[self._row][self._column :], self.lines[self._row + 1 :]


def _joined(line: list[tuple[str, str]]) -> str:
    text, last = "", ""
    for style, character in line:
        if style != last:
            text, last = f"{text}\x1b[0m{style}", style
        text += character
    return f"{text.rstrip()}\x1b[0m" if last else text.rstrip()
