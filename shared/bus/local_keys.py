"""Notes of the folders with the keys of brokers on this machine, by port.

While it runs, `pagemill up` leaves a note with the folder of its keys. So commands of the same user
find the keys without a setting, in any working directory. The note contains no secret.
"""

import contextlib
import os
import re
import tempfile
from pathlib import Path

from shared.errors import ConfigError

_LOOPBACK = re.compile(r"(?:\w+://)?(?:127\.0\.0\.1|localhost|\[::1\]):(\d{1,5})/?")


def _notes() -> Path:
    """Return the folder of this user's notes, which exists until the machine ends."""
    folder = os.environ.get("XDG_RUNTIME_DIR", "")
    if os.path.isabs(folder):
        return Path(folder) / "pagemill"
    return Path(tempfile.gettempdir()) / f"pagemill-{os.getuid()}"


def note_keys(port: int, keys: Path) -> None:
    """Write a note with the folder of the keys of the broker at `port`. Raises ConfigError."""
    folder = _notes()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise PermissionError(1, "it belongs to another user")
        new = folder / f".{port}.{os.getpid()}"
        new.write_text(str(keys.absolute()), encoding="utf-8")
        new.replace(folder / str(port))
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}") from error


def forget_keys(port: int) -> None:
    with contextlib.suppress(OSError):
        (_notes() / str(port)).unlink()


def find_keys(url: str) -> Path | None:
    """Return the folder of the keys of the broker at `url`; None without a note."""
    match = _LOOPBACK.fullmatch(url.strip())
    if match is None:
        return None
    note = _notes() / match[1]
    try:
        # Another user could have written the note.
        if note.stat().st_uid != os.getuid():
            return None
        folder = Path(note.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return None
    return folder if folder.is_dir() else None
