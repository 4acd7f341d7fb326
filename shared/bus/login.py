"""Login: the address of the broker, and how a connection proves who it is.

Secrets stay in files. They are read when a connection is made, so that a key that was replaced is
used by the next one, and no secret is in a command line, a log or an error.
"""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.bus.local_keys import find_keys
from shared.errors import ConfigError
from shared.protocol.permissions import OPERATOR, inbox_of, may_create_streams

# The scheme may be left out. A password may have an "@", which urllib takes for a part of it.
_CREDENTIALS = re.compile(r"(^|,|://)\s*[^/,]*@")


def without_credentials(url: str) -> str:
    """Return a URL, or a list of them, without users and passwords, for logs and messages."""
    return _CREDENTIALS.sub(r"\1", url)


def seed_file(folder: Path, identity: str) -> Path:
    """The file of an identity's key in the folder of `pagemill keys`."""
    return folder / f"{identity}.nk"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM format. A broker that wants to know its clients needs their certificates."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context that accepts only servers of this authority. Raises ConfigError."""
        try:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.minimum_version = ssl.TLSVersion.TLSv1_2
            context.load_verify_locations(self.ca)
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key)
        except (OSError, ssl.SSLError) as error:
            reason = error.strerror or type(error).__name__
            raise ConfigError(
                f"nats.tls: its files cannot be used: {reason}", field="nats.tls_ca"
            ) from error
        return context


@dataclass(frozen=True, slots=True)
class Login:
    """Where the broker is, and the key with which an identity of `pagemill keys` logs in."""

    url: str
    """A URL, or several of one cluster separated by commas."""
    identity: str = ""
    seed_file: Path | None = None
    """None for a broker that knows its clients by their URL, or does not ask."""
    tls: TlsFiles | None = None

    def __str__(self) -> str:
        return without_credentials(self.url)

    def __repr__(self) -> str:
        return f"Login({self})"

    def check_seed(self) -> None:
        """Raise ConfigError for a file without a seed. Its content is not shown."""
        import nkeys  # It takes 50 ms of processor time, which a connection without a key saves.

        assert self.seed_file is not None
        try:
            nkeys.from_seed(bytearray(self.seed_file.read_bytes().strip()))
        except (OSError, nkeys.NkeysError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it holds no seed of a user"
            raise ConfigError(
                f"nats.keys: {self.seed_file} cannot be used: {reason}", field="nats.keys"
            ) from None

    @classmethod
    def of_operator(cls, url: str) -> "Login":
        """The operator's login to a broker that `pagemill up` of this user runs; to any other one,
        a login without a key."""
        keys = find_keys(url)
        return cls(url) if keys is None else cls(url, OPERATOR, seed_file(keys, OPERATOR))

    @property
    def inbox(self) -> str:
        return "_INBOX" if self.seed_file is None else inbox_of(self.identity)

    @property
    def creates_streams(self) -> bool:
        """Whether this identity creates the streams; otherwise it waits for them."""
        return self.seed_file is None or may_create_streams(self.identity)
