"""The pure parts of `pagemill chat`."""

import string
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvalidRequest
from shared.protocol.records import (
    ChoiceDelta,
    ErrorInfo,
    Failure,
    Finish,
    LogRecord,
    TokenChunk,
    Usage,
)
from shared.protocol.requests import ImagePart, Message
from workers.cli.chat.answer import Answer
from workers.cli.chat.conversation import Conversation, describe
from workers.cli.chat.lines import HELP, Command, Said, extend, is_open, parse, parse_params
from workers.cli.terminal import harmless

URL = "https://example.org/a.png"


def nothing_is_an_image(_: str) -> bool:
    return False


def talk(*turns: tuple[str, str]) -> Conversation:
    conversation = Conversation("demo")
    for i, (said, answer) in enumerate(turns):
        conversation.say(said, [])
        conversation.begin(f"req-{i}")
        conversation.end(answer)
    return conversation


def roles(conversation: Conversation) -> list[str]:
    return [message.role for message in conversation.messages()]


# -- the conversation ---------------------------------------------------------------------------


def test_turns_are_kept_in_order_behind_the_system_message() -> None:
    conversation = talk(("a", "b"), ("c", "d"))
    conversation.system = "s"
    contents = [message.content for message in conversation.messages()]
    assert contents == ["s", "a", "b", "c", "d"]
    assert conversation.request_ids == ["req-0", "req-1"]
    assert conversation.request().sampling_params is msgspec.UNSET


def test_images_belong_to_the_next_message_alone() -> None:
    conversation = Conversation("demo", images=[URL])
    conversation.say("a", ["data:x"])
    (message,) = conversation.messages()
    assert isinstance(message.content, list)
    assert [p.url for p in message.content if isinstance(p, ImagePart)] == [URL, "data:x"]
    conversation.end("b")
    conversation.say("c", [])
    assert conversation.messages()[-1].content == "c"
    assert describe(conversation.entries[0]) == f"user: [image {URL}] [image] a"


def test_a_message_without_an_answer_is_replaced() -> None:
    conversation = talk(("a", "b"))
    conversation.say("lost", [])
    conversation.begin("req-x")
    conversation.end("", is_interrupted=True)
    conversation.say("c", [])
    assert [message.content for message in conversation.messages()] == ["a", "b", "c"]


def test_an_interrupted_answer_stays_and_is_marked() -> None:
    conversation = Conversation("demo")
    conversation.say("a", [])
    conversation.begin("req-1")
    assert conversation.unfinished == "req-1"
    conversation.end("half", is_interrupted=True)
    assert conversation.unfinished is None
    assert describe(conversation.entries[-1]) == "assistant: half (interrupted)"
    assert conversation.messages()[-1] == Message("assistant", "half")


def test_an_answer_that_is_empty_is_an_answer() -> None:
    assert roles(talk(("a", ""))) == ["user", "assistant"]


def test_undo_and_rewind() -> None:
    conversation = talk(("a", "b"), ("c", "d"))
    assert conversation.rewind()
    assert roles(conversation) == ["user", "assistant", "user"]
    assert conversation.undo()
    assert conversation.undo()
    assert not conversation.undo()
    assert not conversation.rewind()
    assert conversation.messages() == []


def test_parameters_are_checked_and_removed() -> None:
    conversation = Conversation("demo")
    conversation.set_params({"temperature": 0.5, "max_tokens": 3})
    conversation.set_params({"temperature": None})
    assert conversation.params == {"max_tokens": 3}
    for wrong in ({"temperature": 9}, {"nosuch": 1}, {"n": 2}, {"max_tokens": "many"}):
        with pytest.raises(InvalidRequest, match=next(iter(wrong))):
            conversation.set_params(wrong)
    assert conversation.params == {"max_tokens": 3}


def test_a_file_that_is_refused_changes_nothing() -> None:
    conversation = talk(("a", "b"))
    for data in (b"{", b"5", b'[{"role": "robot"}]', b'{"messages": 1}', b"\xff"):
        with pytest.raises(InvalidRequest, match=r"messages|JSON"):
            conversation.load_json(data)
    assert roles(conversation) == ["user", "assistant"]


def test_the_body_of_a_request_can_be_loaded() -> None:
    conversation = talk(("a", "b"))
    conversation.load_json(b'{"model": "x", "messages": [{"role": "user", "content": "c"}]}')
    assert conversation.messages() == [Message("user", "c")]


texts = st.text(max_size=20)
turns = st.lists(st.tuples(texts, st.lists(texts, max_size=2), texts, st.booleans()), max_size=5)


@given(turns, st.none() | texts)
def test_what_is_saved_is_loaded(said: list[Any], system: str | None) -> None:
    conversation = Conversation("demo", system=system)
    for i, (text, images, answer, is_interrupted) in enumerate(said):
        conversation.say(text, images)
        conversation.begin(f"req-{i}")
        conversation.end(answer, is_interrupted=is_interrupted)
    other = Conversation("demo")
    other.load_json(conversation.to_json())
    assert other.messages() == conversation.messages()
    stored = msgspec.json.decode(msgspec.json.encode(conversation), type=Conversation)
    assert stored == conversation
    # The templates of most models want the roles in turn.
    ours = [role for role in roles(conversation) if role != "system"]
    assert all(a != b for a, b in pairwise(ours))


# -- answers ------------------------------------------------------------------------------------


def records(parts: list[str]) -> list[LogRecord]:
    chunks = [TokenChunk(i, 1, [ChoiceDelta(0, i, [i], part)]) for i, part in enumerate(parts)]
    return [*chunks, Finish(len(parts), 1, Usage(5, len(parts)), 0, [])]


@given(st.lists(texts, max_size=8), st.integers(0, 8), st.integers(0, 8))
def test_an_answer_goes_on_from_any_record_without_a_break(
    parts: list[str], stop: int, again: int
) -> None:
    log = records(parts)
    answer, shown = Answer(), ""
    for record in [*log[:stop], *log[min(again, stop) :]]:
        shown += answer.add(record)
    assert shown == answer.text == "".join(parts)
    assert isinstance(answer.final, Finish)


def test_the_line_below_an_answer() -> None:
    answer = Answer()
    assert answer.summary("req-1", 0.25) == "req-1 · 0.2 s · interrupted"
    answer.add(TokenChunk(0, 1, [ChoiceDelta(0, 0, [1], "a", "length")]))
    answer.add(Finish(1, 1, Usage(5, 1), 0, []))
    assert answer.summary("req-1", 1.0) == "req-1 · 5 + 1 tokens · 1.0 s · length"
    failed = Answer()
    failed.add(Failure(0, 1, ErrorInfo("poison", "x", None, "server", False), []))
    assert failed.summary("req-1", 1.0).endswith("failed")


# -- lines --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("", None),
        ("   \n", None),
        ("/help\n", Command("help", "")),
        ("  /image  a b.png ", Command("image", "a b.png")),
        ("/params temperature=1", Command("params", "temperature=1")),
        ("//etc is a folder", Said("/etc is a folder", [])),
        ("a / b", Said("a / b", [])),
        ("what is @a.png ?", Said("what is ?", ["a.png"])),
        ('@"a b.png" and @a.png', Said("and", ["a b.png", "a.png"])),
        ("ask @alice or me@a.png", Said("ask @alice or me@a.png", [])),
        ("keep  two   spaces", Said("keep  two   spaces", [])),
        ("keep\n  @a.png lines\n  as  typed", Said("keep\n  lines\n  as  typed", ["a.png"])),
        ("/system be\nbrief", Command("system", "be\nbrief")),
        ("/undo\n", Command("undo", "")),
        ('"""\n/etc\n\n  and @a.png\n"""', Said("/etc\n\n  and", ["a.png"])),
        ('"""one line"""', Said("one line", [])),
        ('""" """', None),
        ('say """ once', Said('say """ once', [])),
    ],
)
def test_lines(line: str, said: object) -> None:
    assert parse(line, lambda path: path.endswith(".png")) == said


@pytest.mark.parametrize(
    ("lines", "text"),
    [
        (["one"], "one"),
        (["one\\", "two\\ ", "three"], "one\ntwo\nthree"),
        (["one\\", ""], "one\n"),
        (["C:\\\\"], "C:\\\\"),
        (['"""one', "", "two\\", 'three"""'], '"""one\n\ntwo\\\nthree"""'),
        (['"""', '"quoted"', ' """ '], '"""\n"quoted"\n """ '),
        (['"""one"""'], '"""one"""'),
        (['one """'], 'one """'),
    ],
)
def test_a_message_of_several_lines(lines: list[str], text: str) -> None:
    entered = lines[0]
    for line in lines[1:]:
        assert is_open(entered)
        entered = extend(entered, line)
    assert not is_open(entered)
    assert entered == text


@pytest.mark.parametrize("line", ["/nosuch", "/", "/ help", "/image", "/save  ", "/Help"])
def test_commands_that_are_wrong(line: str) -> None:
    with pytest.raises(InvalidRequest):
        parse(line, nothing_is_an_image)


@given(st.text())
def test_any_line_is_a_message_a_command_or_refused(line: str) -> None:
    try:
        parsed = parse(line, nothing_is_an_image)
    except InvalidRequest:
        assert line.strip().startswith("/")
        return
    match parsed:
        case None:
            assert not line.strip().strip('"')
        case Command(name, _):
            assert name in HELP
        case Said(text, images):
            assert text in line
            assert images == []


@pytest.mark.parametrize(
    ("text", "params"),
    [
        ("", {}),
        ("temperature=0.5 max_tokens=3", {"temperature": 0.5, "max_tokens": 3}),
        ("ignore_eos=true stop=", {"ignore_eos": True, "stop": None}),
        ('stop=["a"] name=a=b', {"stop": ["a"], "name": "a=b"}),
    ],
)
def test_parameters(text: str, params: dict[str, Any]) -> None:
    assert parse_params(text) == params


@pytest.mark.parametrize("text", ["temperature", "=1", "a=1 b"])
def test_parameters_that_are_wrong(text: str) -> None:
    with pytest.raises(InvalidRequest, match="NAME=VALUE"):
        parse_params(text)


# -- the terminal -------------------------------------------------------------------------------


@given(st.text())
def test_no_text_steers_the_terminal(text: str) -> None:
    shown = harmless(text)
    assert len(shown) == len(text)
    steering = {chr(n) for n in (*range(32), *range(127, 160))} - {"\n", "\t"}
    assert not steering & set(shown)
    assert all(a == b for a, b in zip(text, shown, strict=True) if a in string.printable[:95])
