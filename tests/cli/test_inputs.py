"""`@FILE` and `-` in the texts of commands."""

import io
from pathlib import Path

import pytest
from PIL import Image

from shared.errors import InvalidMedia, InvalidRequest
from shared.protocol.multimodal import AUDIO, DOCUMENT, IMAGE, VIDEO
from workers.cli.chat import complete
from workers.cli.inputs import Medium, find_unmarked, read_input, read_text

FILES = {
    "a.png": b"a",
    "a b.png": b"a b",
    "clip.mp4": b"clip",
    "sound": b"RIFF....WAVEfmt ",
    "paper": b"%PDF-1.7",
    "notes.txt": b"two\nlines\n",
    "plain": b"plain text",
    "damaged": b"\xc3\x28",
}


@pytest.fixture(autouse=True)
def _files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, data in FILES.items():
        Path(name).write_bytes(data)


def type_in(data: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data), "utf-8"))


@pytest.mark.parametrize(
    ("typed", "text", "media"),
    [
        ("what is @a.png ?", "what is ?", [("a.png", IMAGE)]),
        ("what is in @a.png? (@clip.mp4)", "what is in ? (@clip.mp4)", [("a.png", IMAGE)]),
        ('@"a b.png" and @a.png', "and", [("a b.png", IMAGE), ("a.png", IMAGE)]),
        (
            "@clip.mp4 @sound @paper",
            "",
            [("clip.mp4", VIDEO), ("sound", AUDIO), ("paper", DOCUMENT)],
        ),
        ("short: @notes.txt, and @plain.", "short: two\nlines, and plain text.", []),
        (" an indented @plain\n", " an indented plain text\n", []),
        ("ask @alice or me@a.png", "ask @alice or me@a.png", []),
        ("send @@a.png @-", "send @a.png @-", []),
        ("keep  two   spaces - here", "keep  two   spaces - here", []),
    ],
)
def test_files_in_a_text(typed: str, text: str, media: list[tuple[str, str]]) -> None:
    found = [(name, kind, FILES[name]) for name, kind in media]
    assert read_input(typed, takes_stdin=False) == (text, found)


@pytest.mark.parametrize("ending", ["gif", "png", "webp"])
def test_an_image_that_moves_is_a_video(ending: str) -> None:
    frames = [Image.new("RGB", (4, 4), color) for color in ("red", "green", "blue")]
    for number in (1, 3):
        frames[0].save(
            f"{number}.{ending}", save_all=True, append_images=frames[1:number], duration=100
        )
    (still, moving) = read_input(f"@1.{ending} @3.{ending}")[1]
    assert (still.kind, moving.kind) == (IMAGE, VIDEO)


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("what is @missing.png?", "missing.png: No such file"),
        ("short: @missing.md", "missing.md: No such file"),
        ("what is @~missing/a.png", "~missing/a.png: No such file"),
        ("what is @damaged", "damaged: it is neither an image"),
    ],
)
def test_files_that_cannot_be_read(typed: str, message: str) -> None:
    with pytest.raises(InvalidMedia, match=message):
        read_input(typed)


def test_stdin_is_a_text_or_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    type_in(b"typed\n", monkeypatch)
    assert read_input("-") == ("typed", [])
    type_in(b"\x89PNG", monkeypatch)
    assert read_input("what is @-") == ("what is", [Medium("-", IMAGE, b"\x89PNG")])
    assert read_input("-", takes_stdin=False) == ("-", [])


def test_commands_of_texts_refuse_media() -> None:
    assert read_text("say @plain") == ("say plain text", [])
    assert read_text("make it red @a.png", IMAGE)[1] == [Medium("a.png", IMAGE, b"a")]
    with pytest.raises(InvalidRequest, match=r"a\.png is a file of kind image"):
        read_text("say @a.png")


def test_a_folder_and_a_file_without_its_mark_are_named(tmp_path: Path) -> None:
    (tmp_path / "scans").mkdir()
    with pytest.raises(InvalidMedia, match=r"^scans is a folder; name a file$"):
        read_input("what is in @scans?")
    assert read_input("@. and @...") == ("@. and @...", [])
    assert find_unmarked("compare a.png, b.png and @a.png with plain") == ["a.png"]


def test_tab_completes_the_path_of_a_file(tmp_path: Path) -> None:
    (tmp_path / "a folder").mkdir()
    found = [complete("@a", number) for number in range(4)]
    assert found == ["@a b.png", "@a folder/", "@a.png", None]
    assert complete("a", 0) is None
