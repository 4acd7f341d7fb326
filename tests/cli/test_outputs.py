"""Files that commands write."""

import os
from pathlib import Path

import pytest

from shared.errors import DiskFull, InvalidRequest
from workers.cli.outputs import NewFile, check_output, free_path, numbered, write_file


def test_a_file_has_its_name_when_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    path.write_bytes(b"old")
    with NewFile(path) as file:
        file.stream.write(b"new")
        assert path.read_bytes() == b"old"
        assert sorted(os.listdir(tmp_path)) == ["out.png", "out.png.part"]
        file.keep()
    assert path.read_bytes() == b"new"
    check_output(tmp_path / "other")
    assert os.listdir(tmp_path) == ["out.png"]


def test_another_command_does_not_touch_a_file_that_is_written(tmp_path: Path) -> None:
    path = tmp_path / "out.png"
    with NewFile(path) as file:
        file.stream.write(b"first")
        with pytest.raises(InvalidRequest, match="another command writes this file"):
            check_output(path)
        file.keep()
    assert path.read_bytes() == b"first"
    write_file(path, b"second")
    assert path.read_bytes() == b"second"


def test_a_link_stays_and_a_link_to_itself_is_replaced(tmp_path: Path) -> None:
    link, loop = tmp_path / "link", tmp_path / "loop"
    link.symlink_to("out.png")
    loop.symlink_to("loop")
    for path in (link, loop):
        write_file(path, b"new")
    assert (link.is_symlink(), loop.is_symlink()) == (True, False)
    assert (tmp_path / "out.png").read_bytes() == loop.read_bytes() == b"new"


@pytest.mark.parametrize(
    ("name", "message"),
    [("missing/out.png", "missing/out.png: No such file"), (".", "Is a directory")],
)
def test_a_file_that_cannot_be_opened(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        check_output(tmp_path / name)


@pytest.mark.parametrize("num_bytes", [4, 2**17])
def test_a_full_disk(num_bytes: int) -> None:
    """Few bytes are written when the file is closed."""
    with pytest.raises(DiskFull, match="/dev/full: No space left on device"):
        write_file(Path("/dev/full"), bytes(num_bytes))


def test_a_name_that_was_not_given_is_a_free_one(tmp_path: Path) -> None:
    path = tmp_path / "image.png"
    assert free_path(path) == path
    path.touch()
    assert free_path(path).name == "image-2.png"
    (tmp_path / "image-2.png").touch()
    assert [file.name for file in numbered(free_path(path, 2), 2)] == [
        "image-2-1.png",
        "image-2-2.png",
    ]
