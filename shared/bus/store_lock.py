"""Lock of a broker's store, so that two brokers never write to one folder."""

import fcntl
import os
from pathlib import Path

from shared.errors import ConfigError, StoreInUse

LOCK_FILE = "lock"


class StoreLock:
    """Exclusive lock of a folder, held until no process has its descriptor any more.

    A broker inherits the descriptor. So its store stays locked if the process that started it is
    killed, and is unlocked when both have ended. The lock belongs to the file and not to its path,
    so a folder with two names has one lock.
    """

    def __init__(self, folder: Path) -> None:
        """Raises StoreInUse if another process holds the lock, ConfigError if locking fails."""
        path = folder / LOCK_FILE
        try:
            path.touch(0o600)
            self._file = path.open("r+b", buffering=0)
        except OSError as error:
            raise _no_lock(path, error) from error
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            with self._file as file:
                holder = _first_alive(file.read())
            if not isinstance(error, BlockingIOError):
                raise _no_lock(path, error) from error
            raise StoreInUse(
                f"nats.store_dir: {folder} is in use by {holder}: stop it, or set another folder",
                field="nats.store_dir",
            ) from None

    def fileno(self) -> int:
        return self._file.fileno()

    def name_holders(self, *pids: int) -> None:
        """Write the ids of the processes with the lock. A StoreInUse error names a living one."""
        data = b" ".join(b"%d" % pid for pid in pids)
        os.pwrite(self.fileno(), data, 0)
        os.ftruncate(self.fileno(), len(data))

    def close(self) -> None:
        """Close the descriptor of this process."""
        self._file.close()


def _no_lock(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"nats.store_dir: {path} cannot be locked: {error.strerror}", field="nats.store_dir"
    )


def _first_alive(pids: bytes) -> str:
    """Return a description of the first living process of a list."""
    for pid in map(int, pids.split()):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        except PermissionError:
            pass
        return f"process {pid}"
    return "another process"
