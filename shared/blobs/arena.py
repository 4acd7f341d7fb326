"""Shared memory that one process writes and other processes of its host map.

It is a memfd without a name, which disappears with the last process that has it open, even if the
process is killed. Before it is shared, it is sealed against shrinking, growing and new writable
mappings: a reader cannot write, and no page can be missing (SIGBUS). Requires Linux 5.1.
"""

import contextlib
import fcntl
import mmap
import os
from collections.abc import Sequence

from shared.blobs.slot_allocator import Slot, SlotPool

Buffer = bytes | bytearray | memoryview

# Not in Python 3.11's fcntl; see fcntl(2).
_F_SEAL_FUTURE_WRITE = 0x0010
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | _F_SEAL_FUTURE_WRITE


class Arena:
    """The writer's side: one area of `capacity` bytes with one payload per slot.

    The system provides pages when they are first written; they are never returned to it.
    """

    def __init__(self, capacity: int) -> None:
        self.slots = SlotPool(capacity)
        self.fd = os.memfd_create("pagemill", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.slots.capacity)
        self._map = mmap.mmap(self.fd, self.slots.capacity)
        fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS | fcntl.F_SEAL_SEAL)
        self._view = memoryview(self._map)

    def put(self, name: str, parts: Sequence[Buffer], holder: str) -> Slot | None:
        """Copy the concatenated `parts` into a slot pinned by `holder`; None if the arena is full.

        A slot that already has this name is assumed to be equal, and only pinned.
        """
        if (slot := self.slots.pin(name, holder)) is not None:
            return slot
        views = [memoryview(part).cast("B") for part in parts]
        slot = self.slots.add(name, sum(view.nbytes for view in views), holder)
        if slot is not None:
            offset = slot.offset
            for view in views:
                self._view[offset : offset + view.nbytes] = view
                offset += view.nbytes
        return slot

    def view(self, slot: Slot) -> memoryview:
        """Return a read-only view, which is valid as long as the slot is pinned."""
        return self._view[slot.offset : slot.offset + slot.num_bytes].toreadonly()

    def close(self) -> None:
        """Close the arena. Its memory is freed with the last view. A second call does nothing."""
        if self.fd < 0:
            return
        os.close(self.fd)
        self.fd = -1
        with contextlib.suppress(BufferError):
            self._view.release()
            self._map.close()


class MappedArena:
    """The reader's side: a read-only mapping of another process's arena."""

    def __init__(self, fd: int) -> None:
        """Map `fd` and close it. Raises ValueError if it is not a sealed arena."""
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            if seals & _SEALS != _SEALS:
                raise ValueError("the memory is not sealed: its owner could remove pages")
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        except OSError as error:
            raise ValueError("not an arena") from error
        finally:
            # The mapping does not need the file descriptor.
            os.close(fd)

    def view(self, offset: int, num_bytes: int) -> memoryview:
        """Return a view of a range. Raises ValueError if it is not within the arena."""
        if offset < 0 or num_bytes < 0 or offset + num_bytes > len(self._map):
            raise ValueError(f"{num_bytes} bytes at {offset} are not within the arena")
        return memoryview(self._map)[offset : offset + num_bytes]
