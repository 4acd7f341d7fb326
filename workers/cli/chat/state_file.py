"""The file that keeps the latest conversation, from which `pagemill chat --resume` continues."""

import contextlib
import os
import tempfile
from pathlib import Path

import msgspec

from shared.errors import ConfigError, NotFound
from shared.protocol.encoding import UNDECODABLE
from workers.cli.chat.conversation import Conversation

NAME = "chat.json"


def find_path() -> Path:
    """Return the path: `pagemill/chat.json` in $XDG_STATE_HOME, by default in ~/.local/state.

    Raises ConfigError for a user without a home directory.
    """
    given = os.environ.get("XDG_STATE_HOME", "")
    try:
        # The specification has relative paths ignored.
        base = Path(given) if os.path.isabs(given) else Path.home() / ".local" / "state"
    except RuntimeError as error:
        message = "HOME: the home directory is not known; set HOME or XDG_STATE_HOME"
        raise ConfigError(message, field="HOME") from error
    return base / "pagemill" / NAME


def write(path: Path, conversation: Conversation) -> None:
    """Replace the file at once, readable by its owner alone. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # mkstemp creates files with the mode 0600.
    fd, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.encode(conversation))
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(name)
        raise


def read(path: Path) -> Conversation:
    """Return the conversation of the file. Raises NotFound without a file that can be read."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Conversation)
    except (OSError, *UNDECODABLE) as error:
        raise NotFound(f"{path} holds no conversation: {error}", field="--resume") from error
