"""The arena between real processes: reading, refusals and cleanup."""

import fcntl
import mmap
import os
import subprocess
import sys
from typing import Any

import pytest

from shared.blobs.arena import Arena, MappedArena

MIB = 2**20


def test_a_reader_sees_what_was_put_without_a_copy() -> None:
    arena = Arena(MIB)
    slot = arena.put("a", [b"abc", memoryview(b"defg")], "writer")
    assert slot is not None
    view = MappedArena(os.dup(arena.fd)).view(slot.offset, slot.num_bytes)
    assert bytes(view) == b"abcdefg" == bytes(arena.view(slot))
    assert view.readonly
    # The memory is shared, so the reader sees the next write, too.
    arena._view[slot.offset] = ord("X")
    assert view[0] == ord("X")


def test_the_same_name_is_the_same_content() -> None:
    arena = Arena(MIB)
    assert arena.put("a", [b"abc"], "x") is arena.put("a", [b"abc"], "y")


def test_wider_items_count_by_bytes() -> None:
    arena = Arena(MIB)
    wide: Any = memoryview(b"abcdefgh").cast("d")
    slot = arena.put("a", [wide], "x")
    assert slot is not None
    assert bytes(arena.view(slot)) == b"abcdefgh"


def test_a_sealed_arena_cannot_shrink_grow_or_be_written() -> None:
    arena = Arena(MIB)
    for size in (0, MIB - 1, 2 * MIB):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fd, size)
    with pytest.raises(PermissionError):
        mmap.mmap(arena.fd, MIB)
    with pytest.raises(PermissionError):
        os.pwrite(arena.fd, b"x", 0)


def test_unsealed_memory_is_not_mapped() -> None:
    fd = os.memfd_create("other", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, MIB)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_GROW)
    with pytest.raises(ValueError, match="not sealed"):
        MappedArena(fd)
    read, write = os.pipe()
    os.close(write)
    with pytest.raises(ValueError, match="not an arena"):
        MappedArena(read)


@pytest.mark.parametrize(("offset", "num_bytes"), [(-1, 1), (0, MIB + 1), (MIB, 1), (0, -1)])
def test_a_range_outside_is_refused(offset: int, num_bytes: int) -> None:
    arena = Arena(MIB)
    with pytest.raises(ValueError, match="not within"):
        MappedArena(os.dup(arena.fd)).view(offset, num_bytes)


def test_a_full_arena_refuses() -> None:
    arena = Arena(MIB)
    assert arena.put("a", [bytes(MIB)], "x") is not None
    assert arena.put("b", [b"b"], "x") is None
    arena.slots.unpin_all("x")
    assert arena.put("b", [b"b"], "x") is not None


WRITER = """
import os, signal, sys
from shared.blobs.arena import Arena
arena = Arena(2**24)
arena.put("a", [b"abc"], "x")
print(arena.fd, flush=True)
signal.pause()
"""


def test_a_killed_writer_frees_its_arena_and_readers_keep_their_mapping() -> None:
    before = set(os.listdir("/dev/shm"))
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        fd = int(writer.stdout.readline())
        mapped = MappedArena(os.open(f"/proc/{writer.pid}/fd/{fd}", os.O_RDONLY))
        writer.kill()
    assert bytes(mapped.view(0, 3)) == b"abc"
    assert set(os.listdir("/dev/shm")) == before
