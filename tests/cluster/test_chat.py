"""`pagemill chat` in a real pseudo-terminal, and from a pipe."""

import asyncio
import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from shared.bus.bus import Bus
from shared.client import follow
from shared.protocol import subjects
from shared.protocol.requests import GenerateRequest, Message, decode_request
from shared.protocol.sampling import SamplingParams
from shared.state import request_status
from tests.cluster.conftest import PAGEMILL, ROOT, Cluster, answer
from tests.cluster.streams import text_of

RED = ROOT / "ops" / "demo_images" / "red.png"
LONG = "/params max_tokens=900 ignore_eos=true temperature=0"
LIMIT_S = 60.0
MAX_PROMPT_LEN = 4
REQUEST_ID = re.compile(r"req-[0-9a-f]{16}")


def _keep_output() -> None:
    """Have the terminal keep what was written and not yet read when Ctrl-C comes.

    By default it is discarded, and a test would miss text that `pagemill` has printed.
    """
    attributes = termios.tcgetattr(0)
    attributes[3] |= termios.NOFLSH
    termios.tcsetattr(0, termios.TCSANOW, attributes)


class Terminal:
    """A running `pagemill chat` and what it has written."""

    def __init__(self, cluster: Cluster, state: Path, *options: str) -> None:
        self.pid, self._fd = pty.fork()
        if self.pid == 0:
            _keep_output()
            env = os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(state)}
            env |= {"TERM": "dumb", "COLUMNS": "400"}
            command = [*PAGEMILL, "chat", "--nats", cluster.url, *options]
            os.execvpe(command[0], [*command, "--config", str(cluster.config)], env)
        os.set_blocking(self._fd, False)
        self.written = ""
        self._at = 0

    def _read(self) -> bool:
        """Read what there is; return False at the end."""
        try:
            data = os.read(self._fd, 65536)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.written += data.decode(errors="replace").replace("\r\n", "\n")
        return bool(data)

    async def until(self, pattern: str) -> re.Match[str]:
        """Return the next place that matches, behind the one before."""
        deadline = time.monotonic() + LIMIT_S
        while (found := re.compile(pattern).search(self.written, self._at)) is None:
            assert self._read() or re.search(pattern, self.written[self._at :]), self.written
            assert time.monotonic() < deadline, f"no {pattern!r} in {self.written!r}"
            await asyncio.sleep(0.02)
        self._at = found.end()
        return found

    async def prompted(self) -> None:
        """Wait for the prompt behind the latest output.

        What is typed before is echoed at once, in the middle of that output.
        """
        self._at = max(0, self._at - MAX_PROMPT_LEN)
        await self.until(r"(> |\.\.\. )$")

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
        at = self._at
        end = await self.until(rf"\n?({REQUEST_ID.pattern}) · [^\n]*\n")
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


@pytest.fixture
def opened() -> Iterator[list[Terminal]]:
    terminals: list[Terminal] = []
    yield terminals
    for terminal in terminals:
        terminal.kill()


@pytest.fixture
async def terminal(cluster: Cluster, tmp_path: Path, opened: list[Terminal]) -> Terminal:
    opened.append(Terminal(cluster, tmp_path))
    await opened[-1].until("> $")
    return opened[-1]


async def messages_of(bus: Bus, terminal: Terminal, line: str) -> tuple[list[Message], str]:
    """Ask, and return the messages of the request on the bus, and the answer."""
    listener = await bus._nc.subscribe(subjects.REQUESTS_FILTER)
    await bus._nc.flush()
    said, _ = await terminal.ask(line)
    request = decode_request((await listener.next_msg(10)).data)
    await listener.unsubscribe()
    return request.messages or [], said


async def test_a_conversation(terminal: Terminal, client: Bus, tmp_path: Path) -> None:
    await terminal.say("/system Be kind.", "> $")
    first, one = await messages_of(client, terminal, "What can you do?")
    assert first == [Message("system", "Be kind."), Message("user", "What can you do?")]
    second, two = await messages_of(client, terminal, "Who are you?")
    assert second == [*first, Message("assistant", one), Message("user", "Who are you?")]
    assert [message.role for message in second] == ["system", "user", "assistant", "user"]
    await terminal.say("/undo", "> $")
    again, same = await messages_of(client, terminal, "Who are you?")
    assert (again, same) == (second, two)

    saved = tmp_path / "saved chat.json"
    await terminal.say(f"/save {saved}", "5 messages")
    tree = json.loads(saved.read_text())
    assert [message["role"] for message in tree] == [*(m.role for m in second), "assistant"]
    await terminal.say("/undo", "> $")
    await terminal.say(f"/load {saved}", "5 messages")
    await terminal.say("/history", re.escape(f"assistant: {two.split()[0]}"))
    await terminal.say("/requests", REQUEST_ID.pattern)
    repeated, _ = await messages_of(client, terminal, "/retry")
    assert repeated == second
    assert await terminal.close() == 0


async def test_a_message_of_several_lines(terminal: Terminal, client: Bus) -> None:
    terminal.type("one\\\n")
    await terminal.until(r"\.\.\. $")
    messages, _ = await messages_of(client, terminal, "two")
    assert messages == [Message("user", "one\ntwo")]


async def test_images(terminal: Terminal, client: Bus) -> None:
    await terminal.say(f"/image {RED}", "images of the next message: 1")
    messages, said = await messages_of(client, terminal, "What color is this image?")
    assert "red" in said.lower()
    (message,) = messages
    assert isinstance(message.content, list)
    assert len(message.content) == 2
    await terminal.say("/undo", "> $")
    named, said = await messages_of(client, terminal, f"@{RED} What color is this image?")
    assert (named, "red" in said.lower()) == (messages, True)


async def test_errors_are_one_line_and_the_conversation_goes_on(terminal: Terminal) -> None:
    await terminal.say("/nosuch", r"error invalid_request: there is no command /nosuch")
    await terminal.say("/params temperature=9", "error invalid_request: temperature: ")
    await terminal.say(f"/image {ROOT / 'README.md'}", "images of the next message: 1")
    await terminal.say("hello", r"\nerror invalid_media: [^\n]+\n")
    said, _ = await terminal.ask("What can you do?")
    assert said


async def test_ctrl_c_ends_an_answer_and_not_the_conversation(
    terminal: Terminal, client: Bus, tmp_path: Path
) -> None:
    await terminal.until("$")
    # Python may handle a Ctrl-C that comes just before it waits for input with the next key.
    terminal.type("\x03\n")
    await terminal.until("Ctrl-D or /quit leaves")
    await terminal.say(LONG, "> $")
    terminal.type("What can you do?\n")
    at = len(terminal.written)
    await terminal.until(r"What can you do\?\s*\n[^\n]{8}")
    terminal.type("\x03")
    end = await terminal.until(rf"({REQUEST_ID.pattern}) · [^\n]* · interrupted\n")
    saved = tmp_path / "saved.json"
    await terminal.say(f"/save {saved}", "2 messages")
    assert json.loads(saved.read_text())[1]["content"] in terminal.written[at:].replace("^C", "")
    records = [record async for record in follow(client, end[1])]
    assert (await request_status.find(client, end[1])).error_code == "cancelled"
    await terminal.say("/history", r"assistant: [^\n]+ \(interrupted\)")
    assert text_of(records).startswith(json.loads(saved.read_text())[1]["content"])
    await terminal.say("/params max_tokens=3", "max_tokens=3")
    assert (await terminal.ask("What can you do?"))[0]


async def test_a_killed_chat_resumes_its_answer(
    cluster: Cluster, client: Bus, tmp_path: Path, opened: list[Terminal], terminal: Terminal
) -> None:
    await terminal.say(LONG, "> $")
    terminal.type("What can you do?\n")
    await terminal.until(r"What can you do\?\s*\n[^\n]{8}")
    terminal.kill()
    state = tmp_path / "pagemill" / "chat.json"
    assert state.stat().st_mode & 0o777 == 0o600
    request_id = json.loads(state.read_text())["unfinished"]

    opened.append(Terminal(cluster, tmp_path, "--resume"))
    resumed = opened[-1]
    await resumed.until("leaves\n")
    at = resumed._at
    end = await resumed.until(rf"\n{request_id} · [^\n]* · length\n")
    records = [record async for record in follow(client, request_id)]
    said = resumed.written[at : end.start()]
    assert said == text_of(records)
    request = GenerateRequest("demo", [Message("user", "What can you do?")])
    whole = await answer_with(client, request, max_tokens=900, ignore_eos=True, temperature=0.0)
    assert said == whole
    assert "unfinished" not in json.loads(state.read_text())
    await resumed.say("/resume", "no answer is unfinished")
    assert await resumed.close() == 0


async def answer_with(bus: Bus, request: GenerateRequest, **sampling: object) -> str:
    params = msgspec.convert(sampling, SamplingParams)
    return text_of(await answer(bus, msgspec.structs.replace(request, sampling_params=params)))


async def test_a_pipe(cluster: Cluster, tmp_path: Path) -> None:
    saved = tmp_path / "saved.json"
    done = await asyncio.to_thread(
        subprocess.run,
        [*PAGEMILL, "chat", "--nats", cluster.url, "--config", str(cluster.config)],
        input=f"What can you do?\n\n/save {saved}\n/nosuch\n",
        env=os.environ | {"PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    said = [message["content"] for message in json.loads(saved.read_text())]
    assert done.stdout == f"{said[1]}\n"
    assert REQUEST_ID.search(done.stderr)
    assert "there is no command /nosuch" in done.stderr
    assert done.returncode == 1
