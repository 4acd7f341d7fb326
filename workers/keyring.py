"""Keyring: the folder of `pagemill keys`, with a key for each identity and the server's accounts.

The seed of each key is in a separate file, which only its owner can read. The server's
configuration contains the public keys alone.
"""

import os
import secrets
from collections.abc import Iterable
from pathlib import Path

import nkeys

from shared.bus.accounts import accounts_config
from shared.bus.login import seed_file
from shared.config.schema import NatsConfig
from shared.errors import ConfigError, InvalidRequest, NotFound
from shared.protocol.names import NAME_RULE, is_name
from shared.protocol.permissions import METRICS, OPERATOR
from workers.roles import all_roles

ACCOUNTS_FILE = "accounts.conf"
TENANTS = "tenants"
DEFAULT_TENANT = "local"
"""The tenant that `pagemill up` makes for clients on its machine."""

_DEFAULTS = NatsConfig()


class Keyring:
    """The keys in a folder."""

    def __init__(self, folder: Path, settings: NatsConfig = _DEFAULTS) -> None:
        """`settings` has the limits of each tenant's account."""
        self.folder = folder
        self._settings = settings
        self.accounts_file = folder / ACCOUNTS_FILE

    @property
    def tenants(self) -> list[str]:
        return sorted(file.stem for file in (self.folder / TENANTS).glob("*.nk"))

    def complete(self, tenants: Iterable[str] = ()) -> list[str]:
        """Create the missing keys, and return their names. Raises ConfigError.

        The accounts are written again, because this version may permit other subjects.
        """
        try:
            (self.folder / TENANTS).mkdir(parents=True, exist_ok=True, mode=0o700)
            self.folder.chmod(0o700)
            files = {name: seed_file(self.folder, name) for name in _identities()}
            files |= {name: self.file_of_tenant(name) for name in tenants}
            missing = [name for name, file in files.items() if not file.exists()]
            for name in missing:
                _write_seed(files[name])
            self._write_accounts()
        except OSError as error:
            raise ConfigError(
                f"nats.keys: {error.filename} cannot be written: {error.strerror}",
                field="nats.keys",
            ) from error
        return missing

    def add_tenant(self, name: str) -> Path:
        """Create the key of a tenant, and return its file. Raises InvalidRequest or ConfigError."""
        if not is_name(name):
            raise InvalidRequest(f"tenant {NAME_RULE}", field="tenant")
        if name in self.tenants:
            raise InvalidRequest(f"tenant {name} has a key already", field="tenant")
        self.complete([name])
        return self.file_of_tenant(name)

    def remove_tenant(self, name: str) -> None:
        """Remove the key of a tenant. Raises NotFound."""
        if name not in self.tenants:
            raise NotFound(f"no tenant {name} has a key", field="tenant")
        self.file_of_tenant(name).unlink()
        self._write_accounts()

    def rotate(self, names: Iterable[str]) -> list[Path]:
        """Replace keys of identities and tenants, by default all; return their files.

        Raises NotFound for a name without a key.
        """
        files = {name: seed_file(self.folder, name) for name in _identities()}
        files |= {f"{TENANTS}/{name}": self.file_of_tenant(name) for name in self.tenants}
        chosen = list(names) or list(files)
        for name in chosen:
            if name not in files or not files[name].exists():
                raise NotFound(f"no key of {name} in {self.folder}", field="names")
        for name in chosen:
            _write_seed(files[name])
        self._write_accounts()
        return [files[name] for name in chosen]

    def files(self) -> list[Path]:
        """Return the files of all keys."""
        return sorted(self.folder.rglob("*.nk"))

    def file_of_tenant(self, name: str) -> Path:
        return seed_file(self.folder / TENANTS, name)

    def has_current_accounts(self) -> bool:
        """Return whether the server's accounts permit what the roles of this version need."""
        try:
            return self.accounts_file.read_bytes() == self._accounts()
        except OSError:
            return False

    def _write_accounts(self) -> None:
        _replace(self.accounts_file, self._accounts())

    def _accounts(self) -> bytes:
        workers = {name: _public(seed_file(self.folder, name)) for name in _identities()}
        tenants = {name: _public(self.file_of_tenant(name)) for name in self.tenants}
        return accounts_config(workers, tenants, self._settings).encode()


def _identities() -> list[str]:
    return [OPERATOR, METRICS, *(role.name for role in all_roles())]


def _write_seed(file: Path) -> None:
    # Without a newline, because NATS clients such as the one for JavaScript refuse it.
    _replace(file, nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER))


def _public(file: Path) -> str:
    try:
        return str(nkeys.from_seed(bytearray(file.read_bytes().strip())).public_key.decode())
    except (nkeys.NkeysError, ValueError):
        raise ConfigError(f"nats.keys: {file} holds no seed of a user", field="nats.keys") from None


def _replace(file: Path, data: bytes) -> None:
    """Replace a file atomically. Only its owner can read it."""
    new = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as output:
        output.write(data)
        output.flush()
        os.fsync(output.fileno())
    new.replace(file)
