"""Progress of reading weights: the part of a folder's files that this process has read.

The safetensors library maps files, and a page of a file is read from the disk when it is first
used. The kernel counts these pages. A count of loaded tensors would be ahead of the disk.
"""

from pathlib import Path

SMAPS = Path("/proc/self/smaps")


class WeightsProgress:
    """Bytes read of the safetensors files in one folder.

    The largest number of bytes that were in memory counts for a file, because files are unmapped
    after they have been copied.
    """

    def __init__(self, folder: Path) -> None:
        # A broken link is reported by the loader.
        files = [file.resolve() for file in folder.glob("*.safetensors") if file.is_file()]
        self._sizes = {str(file): file.stat().st_size for file in files}
        self._read = dict.fromkeys(self._sizes, 0)

    def measure(self) -> tuple[int, int] | None:
        """Return the bytes read and the bytes of all files; None if the kernel does not count."""
        try:
            resident = _resident_bytes(SMAPS.read_text(errors="replace"))
        except OSError:
            return None
        for file in self._sizes.keys() & resident.keys():
            # The last page of a file is counted as a whole.
            self._read[file] = max(self._read[file], min(resident[file], self._sizes[file]))
        return sum(self._read.values()), sum(self._sizes.values())


def _resident_bytes(smaps: str) -> dict[str, int]:
    """Return the bytes in memory of each mapped safetensors file.

    A mapping is a line `begin-end mode offset device inode path`, and lines `Name: value kB`.
    """
    resident: dict[str, int] = {}
    file = None
    for line in smaps.splitlines():
        head, *rest = line.split(maxsplit=5)
        if not head.endswith(":"):
            path = rest[4] if len(rest) == 5 else ""
            file = path if path.endswith(".safetensors") else None
        elif head == "Rss:" and file is not None:
            resident[file] = resident.get(file, 0) + 1024 * int(rest[0])
    return resident
