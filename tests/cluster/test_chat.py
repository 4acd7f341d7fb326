"""`pagemill chat` in a real pseudo-terminal, and from a pipe."""

import asyncio
import contextlib
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import AsyncIterator

import pytest

from shared.bus.bus import Bus
from shared.client import follow
from shared.protocol import subjects
from shared.protocol.requests import Message, decode_request
from shared.state import request_status
from tests.cluster.conftest import FORKED_PAGEMILL, PAGEMILL, ROOT, Cluster, run
from tests.cluster.streams import text_of

RED = ROOT / "ops" / "demo_images" / "red.png"
LONG = "/params max_tokens=900 ignore_eos=true temperature=0"
LIMIT_S = 60.0
PROMPT = "> "
REQUEST_ID = re.compile(r"req-[0-9a-f]{16}")


def _keep_output() -> None:
    """Keep unread output when Ctrl-C is pressed.

    By default the terminal discards it, and a test would miss text that `pagemill` has printed.
    """
    attributes = termios.tcgetattr(0)
    attributes[3] |= termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, attributes)


class Terminal:
    """A running `pagemill chat` and its output."""

    def __init__(self, cluster: Cluster) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            _keep_output()
            env = os.environ | {"PYTHONPATH": str(ROOT), "TERM": "dumb", "COLUMNS": "400"}
            command = [*PAGEMILL, "chat", "--nats", cluster.url, "--config", str(cluster.config)]
            os.execvpe(command[0], command, env)
        os.set_blocking(self._fd, False)
        self.written = ""
        self.at = 0

    def _read(self) -> bool:
        """Read the available output; return False at the end."""
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.written += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    async def until(self, pattern: str) -> re.Match[str]:
        """Wait for output that matches, after the previous match."""
        deadline = time.monotonic() + LIMIT_S
        while (match := re.compile(pattern).search(self.written, self.at)) is None:
            assert self._read() or re.search(pattern, self.written[self.at :]), self.written
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.written!r}"
            await asyncio.sleep(0.02)
        self.at = match.end()
        return match

    async def prompted(self) -> None:
        """Wait for the prompt after the latest output.

        The terminal echoes input at once, so earlier input would appear within that output.
        """
        self.at = max(0, self.at - len(PROMPT))
        await self.until("> $")

    def type(self, text: str) -> None:
        os.write(self._fd, text.encode())

    async def say(self, line: str, pattern: str) -> re.Match[str]:
        await self.prompted()
        self.type(line + "\n")
        await self.until(re.escape(line))
        return await self.until(pattern)

    async def ask(self, line: str) -> tuple[str, str]:
        """Return the answer and its request id."""
        await self.prompted()
        self.type(line + "\n")
        await self.until(re.escape(line) + r"\s*\n")
        at = self.at
        end = await self.until(rf"\n?({REQUEST_ID.pattern}) · [^\n]*\n")
        assert not re.search(r"· (failed|interrupted)\n", end[0]), self.written
        return self.written[at : end.start()], end[1]

    async def close(self) -> int:
        """Press Ctrl-D and return the exit code."""
        await self.prompted()
        self.type("\x04")
        return await asyncio.to_thread(self._wait)

    def _wait(self) -> int:
        os.set_blocking(self._fd, True)
        while self._read():
            pass
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError, ChildProcessError):
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        with contextlib.suppress(OSError):
            os.close(self._fd)
        self._fd = -1


@pytest.fixture
async def terminal(cluster: Cluster) -> AsyncIterator[Terminal]:
    terminal = Terminal(cluster)
    try:
        await terminal.until("> $")
        yield terminal
    finally:
        terminal.kill()


async def messages_of(bus: Bus, terminal: Terminal, line: str) -> tuple[list[Message], str]:
    """Ask, and return the messages of the request on the bus, and the answer."""
    listener = await bus.connection.nc.subscribe(subjects.REQUESTS_FILTER)
    await bus.connection.nc.flush()
    answer, _ = await terminal.ask(line)
    request = decode_request((await listener.next_msg(10)).data)
    await listener.unsubscribe()
    return request.messages or [], answer


async def test_a_conversation(terminal: Terminal, client: Bus) -> None:
    await terminal.say("/system Be kind.", "> $")
    first, reply = await messages_of(client, terminal, "What can you do?")
    assert first == [Message("system", "Be kind."), Message("user", "What can you do?")]
    second, answer = await messages_of(client, terminal, "Who are you?")
    assert second == [*first, Message("assistant", reply), Message("user", "Who are you?")]
    assert await messages_of(client, terminal, "/retry") == (second, answer)
    await terminal.say("/undo", "> $")
    assert await messages_of(client, terminal, "Who are you?") == (second, answer)
    assert await terminal.close() == 0


async def test_images(terminal: Terminal, client: Bus) -> None:
    messages, answer = await messages_of(client, terminal, f"@{RED} What color is this image?")
    assert "red" in answer.lower()
    (message,) = messages
    assert isinstance(message.content, list)
    assert len(message.content) == 2


async def test_errors_are_one_line_and_the_conversation_continues(terminal: Terminal) -> None:
    await terminal.say("/nosuch", r"error invalid_request: there is no command /nosuch")
    await terminal.say("/params temperature=9", "error invalid_request: temperature: ")
    await terminal.say("/model nosuch", "error unknown_model: there is no model nosuch; ")
    await terminal.say("/model demo", "> $")
    answer, _ = await terminal.ask("What can you do?")
    assert answer


async def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    cluster: Cluster, terminal: Terminal, client: Bus
) -> None:
    # Python may handle a Ctrl-C that comes just before it waits for input with the next key.
    terminal.type("\x03\n")
    await terminal.until("Ctrl-D or /quit leaves")
    await terminal.say(LONG, "> $")
    terminal.type("What can you do?\n")
    await terminal.until(r"What can you do\?\s*\n")
    at = terminal.at
    await terminal.until(r"[^\n]{8}")
    terminal.type("\x03")
    end = await terminal.until(rf"\n({REQUEST_ID.pattern}) · [^\n]* · interrupted\n")
    text = terminal.written[at : end.start()].replace("^C", "")
    records = [record async for record in follow(client, end[1])]
    assert text_of(records).startswith(text)
    assert (await request_status.find(client, end[1])).error_code == "cancelled"
    await terminal.say("/params max_tokens=3", "max_tokens=3")
    messages, answer = await messages_of(client, terminal, "What can you do?")
    assert messages[1] == Message("assistant", text)
    assert answer


async def test_a_killed_chat_leaves_an_answer_that_can_be_followed(
    cluster: Cluster, terminal: Terminal
) -> None:
    await terminal.say(LONG, "> $")
    terminal.type("What can you do?\n")
    await terminal.until(r"What can you do\?\s*\n")
    at = terminal.at
    await terminal.until(r"[^\n]{8}")
    terminal.kill()
    request_id = run(cluster, "requests", "--limit", "1").split()[-1]
    assert run(cluster, "follow", request_id).startswith(terminal.written[at:])


async def test_a_pipe(cluster: Cluster) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [*FORKED_PAGEMILL, "chat", "--nats", cluster.url, "--config", str(cluster.config)],
        input="What can you do?\n\n/nosuch\n",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    (request_id,) = REQUEST_ID.findall(done.stderr)
    assert done.stdout == await asyncio.to_thread(run, cluster, "follow", request_id)
    assert "there is no command /nosuch" in done.stderr
    assert done.returncode == 1
