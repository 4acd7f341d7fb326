"""`pagemill chat` at a real broker, where the test itself is the worker that answers."""

import asyncio
import io
import json
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared import client
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.login import Login
from shared.config.parsing import parse_config
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import InvalidRequest, Overloaded, PagemillError
from shared.protocol import subjects
from shared.protocol.records import ChoiceDelta, OutputSummary, Usage
from shared.protocol.requests import GenerateRequest, ImagePart, Message, TextPart, decode_request
from shared.protocol.sampling import SamplingParams
from shared.state.token_log import LogWriter, end_request
from workers.cli.chat import HELP, Chat, merge_params, parse_command
from workers.cli.terminal import ClosedOutput

Step = str | PagemillError | Callable[[], None]
HELLO: list[Step] = ["Hello ", "world"]
BUSY = Overloaded("the queue\nis [full]\x1b[2J")


class Talk:
    """Runs conversations from a pipe, and answers their requests."""

    def __init__(self, url: str, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> None:
        self._url = url
        self._bus = bus
        self._monkeypatch = monkeypatch
        self.model = f"model-{secrets.token_hex(6)}"
        self.requests: list[GenerateRequest] = []
        self.ids: list[str] = []

    async def run(self, *lines: str, answers: Sequence[Sequence[Step]] = (), **options: str) -> int:
        """Return the exit code after all lines."""
        data = "".join(f"{line}\n" for line in lines).encode(errors="surrogateescape")
        self._monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))
        listener = await self._bus.connection.nc.subscribe(subjects.REQUESTS_FILTER)
        await self._bus.connection.nc.flush()
        models = {name: {"path": "none"} for name in (self.model, f"{self.model}-new")}
        config = parse_config(json.dumps({"models": models}), {}, "test")
        chat = Chat(Login.of_operator(self._url), config, self.model, **options)
        running = asyncio.create_task(asyncio.to_thread(chat.run))
        for steps in answers:
            message = await listener.next_msg(30)
            await self._bus.purge(subjects.REQUESTS_STREAM, message.subject)
            self.requests.append(decode_request(message.data))
            self.ids.append(subjects.id_in(message.subject))
            await self._answer(self.ids[-1], steps)
        code = await running
        await listener.unsubscribe()
        return code

    async def _answer(self, request_id: str, steps: Sequence[Step]) -> None:
        """Answer with texts, and end with an error or by a call if the last step is one."""
        log = await LogWriter.open(self._bus, request_id, attempt=1)
        for position, step in enumerate(steps):
            if isinstance(step, PagemillError):
                await end_request(self._bus, request_id, attempt=1, error=step, path=[])
                return
            if not isinstance(step, str):
                await asyncio.to_thread(step)
                return
            end: Literal["stop"] | None = "stop" if step == steps[-1] else None
            await log.tokens([ChoiceDelta(0, position, [1], step, end)])
        await log.finish(OutputSummary(usage=Usage(5, len(steps)), path=[]), {})

    def contents(self) -> list[list[object]]:
        """Return the contents of the messages in each request."""
        return [[message.content for message in r.messages or []] for r in self.requests]


@pytest.fixture
def talk(broker: EmbeddedServer, bus: Bus, monkeypatch: pytest.MonkeyPatch) -> Talk:
    return Talk(broker.url, bus, monkeypatch)


# -- conversations --------------------------------------------------------------------------------


async def test_a_request_has_all_messages_before_it(talk: Talk) -> None:
    lines = ("a", "", "b", "/undo", "/system", "//etc", "/retry", "/undo", "/undo", "caf\udce9")
    assert await talk.run(*lines, answers=(HELLO, [], HELLO, HELLO, HELLO), system="s") == 0
    assert talk.contents() == [
        ["s", "a"],
        ["s", "a", "Hello world", "b"],
        ["a", "Hello world", "/etc"],
        ["a", "Hello world", "/etc"],
        ["caf\N{REPLACEMENT CHARACTER}"],
    ]
    roles = [message.role for message in talk.requests[1].messages or []]
    assert roles == ["system", "user", "assistant", "user"]


async def test_settings_are_sent(talk: Talk, capsys: pytest.CaptureFixture[str]) -> None:
    new_model = f"{talk.model}-new"
    change = ("/model nope", "/model", f"/model {new_model}")
    lines = ("a", "/params max_tokens=3", *change, "b", "/params max_tokens=", "c")
    assert await talk.run(*lines, answers=(HELLO, HELLO, HELLO)) == 1
    first, second, third = (request.sampling_params for request in talk.requests)
    assert isinstance(second, SamplingParams)
    assert (second.max_tokens, third) == (3, first)
    assert [r.model for r in talk.requests] == [talk.model, new_model, new_model]
    notes = capsys.readouterr().err
    assert "max_tokens=3\n" in notes
    assert f"\n{new_model}\n" in notes
    assert f"\n{talk.model}, others: {new_model}\n" in notes
    assert f"there is no model nope; there are: {talk.model}, {new_model}\n" in notes
    assert "the model's configured defaults apply" in notes


async def test_a_conversation_can_begin_again(talk: Talk) -> None:
    lines = ("a", "/clear", "b", "/bye", "never sent")
    assert await talk.run(*lines, answers=(HELLO, HELLO), system="s") == 0
    assert talk.contents() == [["s", "a"], ["s", "b"]]


async def test_an_answer_that_is_empty_is_an_answer(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    await talk.run("a", "b", answers=([], HELLO))
    assert talk.contents()[1] == ["a", "", "b"]
    output = capsys.readouterr()
    assert output.out == "\nHello world\n"
    ends = [line.split(" · ")[1::2] for line in output.err.splitlines()]
    assert ends == [["5 + 0 tokens", "finished"], ["5 + 2 tokens", "stop"]]


async def test_a_message_without_an_answer_is_replaced(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = ("a", "/retry", "b")
    assert await talk.run(*lines, answers=([BUSY], [BUSY], HELLO)) == 1
    assert talk.contents() == [["a"], ["a"], ["b"]]
    output = capsys.readouterr()
    assert output.out == "Hello world\n"
    first, end, *_ = output.err.splitlines()
    assert first == "error overloaded: the queue is [full]\N{REPLACEMENT CHARACTER}[2J"
    assert end.endswith(" s · failed")


async def test_the_text_before_an_error_stays_in_the_conversation(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await talk.run("a", "b", answers=(["Hello ", BUSY], HELLO)) == 1
    assert talk.contents()[1] == ["a", "Hello ", "b"]
    assert capsys.readouterr().out == "Hello \nHello world\n"


async def test_an_answer_that_is_cut_off_names_the_command_that_prints_it(
    own_broker: EmbeddedServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = await Bus.connect(own_broker.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    talk = Talk(own_broker.url, bus, monkeypatch)

    def end_broker() -> None:
        while capsys.readouterr().out != "Hello ":
            time.sleep(0.02)
        own_broker.kill()

    assert await talk.run("a", answers=(["Hello ", end_broker],)) == 1
    (line,) = capsys.readouterr().err.splitlines()
    stored = f"the request is stored: pagemill follow {talk.ids[0]}"
    assert line == f"error unavailable: the server has stopped; {stored}"
    await bus.close()


class FullDisk(io.StringIO):
    def write(self, _: str) -> int:
        raise OSError(28, "No space\nleft")


async def test_a_fault_of_this_machine_is_one_line(
    talk: Talk, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", FullDisk())
    assert await talk.run("a", "@~no-such-user/a.png", answers=(HELLO,)) == 1
    notes = capsys.readouterr().err.splitlines()
    full, missing = [line for line in notes if line.startswith("error")]
    assert full == "error OSError: [Errno 28] No space left"
    assert missing == "error invalid_media: ~no-such-user/a.png: No such file or directory"


async def test_a_closed_output_ends_the_chat(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", ClosedOutput())
    with pytest.raises(BrokenPipeError):
        await talk.run("a", "b", answers=(HELLO,))


async def test_images_are_stored_and_sent_with_each_request(
    talk: Talk, bus: Bus, tmp_path: Path
) -> None:
    (tmp_path / "a b.png").write_bytes(b"image")
    await talk.run(f'@"{tmp_path}/a b.png" what is it?', "and now?", answers=(HELLO, HELLO))
    for request in talk.requests:
        message = (request.messages or [])[0]
        assert isinstance(message.content, list)
        image, text = message.content
        assert isinstance(image, ImagePart)
        assert await client.find_media(bus, image.url) == b"image"
        assert text == TextPart("what is it?")
    assert (talk.requests[1].messages or [])[2] == Message("user", "and now?")


async def test_commands_that_fail_and_the_help(
    talk: Talk, capsys: pytest.CaptureFixture[str]
) -> None:
    assert await talk.run("/undo", "/retry", "/resume", "/params n=2", "/help") == 1
    output = capsys.readouterr()
    assert [line.split(":")[0] for line in output.err.splitlines()] == [
        *["error not_found"] * 2,
        *["error invalid_request"] * 2,
    ]
    assert [line.split()[0] for line in output.out.splitlines()] == [
        *(f"/{n}" for n in HELP),
        "@FILE",
    ]
    assert await talk.run("/quit", "/nosuch") == 0


# -- lines ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "command"),
    [
        ("", None),
        ("a / b", None),
        ("//etc is a folder", None),
        ("/help", ("help", "")),
        ("/system  be  brief", ("system", "be  brief")),
        ("/params\ttemperature=1", ("params", "temperature=1")),
    ],
)
def test_commands(line: str, command: object) -> None:
    assert parse_command(line) == command


@given(st.text() | st.text().map("/{}".format))
def test_any_line_is_a_message_a_known_command_or_refused(line: str) -> None:
    try:
        command = parse_command(line)
    except InvalidRequest:
        assert line.startswith("/")
        return
    assert command is None or command[0] in HELP


@pytest.mark.parametrize("line", ["/nosuch", "/", "/ help", "/Help", "/save a", "/image a.png"])
def test_commands_that_do_not_exist(line: str) -> None:
    with pytest.raises(InvalidRequest, match="there is no command"):
        parse_command(line)


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("", {"seed": 1}),
        ("temperature=0.5 max_tokens=3", {"seed": 1, "temperature": 0.5, "max_tokens": 3}),
        ("ignore_eos=true seed=", {"ignore_eos": True}),
        ('stop=["a=b"] seed=null', {"stop": ["a=b"]}),
    ],
)
def test_parameters(text: str, params: dict[str, Any]) -> None:
    assert merge_params({"seed": 1}, text) == params


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        *((text, "NAME=VALUE") for text in ("temperature", "=1", "seed=1 b")),
        *((f"{name}={value}", name) for name, value in [("temperature", 9), ("n", 2), ("x", 1)]),
        ("max_tokens=many", "max_tokens"),
    ],
)
def test_parameters_that_are_wrong(text: str, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        merge_params({}, text)
