"""Login: the address of the broker, and the credentials of a connection.

Secrets stay in files, which are read for each connection. So the next connection uses a replaced
key, and no secret is in a command line, a log or an error.
"""

import re
import ssl
from dataclasses import dataclass
from pathlib import Path

from shared.bus.local_keys import find_keys
from shared.errors import ConfigError
from shared.protocol.permissions import OPERATOR, inbox_of, may_create_streams

# The scheme is optional. Unlike urllib, this does not end a password at an "@" in it.
_CREDENTIALS = re.compile(r"(^|,|://)\s*[^/,]*@")


def without_credentials(url: str) -> str:
    """Return a URL, or a list of URLs, without users and passwords, for logs and messages."""
    return _CREDENTIALS.sub(r"\1", url)


def seed_file(folder: Path, identity: str) -> Path:
    """Return the file of an identity's key in the folder of `pagemill keys`."""
    return folder / f"{identity}.nk"


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """Files in PEM format. Some brokers require a certificate of the client."""

    ca: Path
    cert: Path | None = None
    key: Path | None = None

    def context(self) -> ssl.SSLContext:
        """Return a context that accepts only servers with a certificate of this authority.

        Raises ConfigError.
        """
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
    """Address of the broker, and the key of an identity of `pagemill keys`."""

    url: str
    """URL of the broker, or comma-separated URLs of a cluster's servers."""
    identity: str = ""
    seed_file: Path | None = None
    """None for a broker that authenticates clients by their URL, or not at all."""
    tls: TlsFiles | None = None
    domain: str | None = None
    """JetStream domain of the broker, if the server may be a leaf node."""

    def __str__(self) -> str:
        return without_credentials(self.url)

    def __repr__(self) -> str:
        return f"Login({self})"

    def check_seed(self) -> None:
        """Raise ConfigError for a file without a seed. The error does not contain the content."""
        import nkeys  # It takes 50 ms of processor time, and only keys need it.

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
        """Return the operator's login at a broker of this user's `pagemill up`.

        For any other broker, return a login without a key.
        """
        keys = find_keys(url)
        return cls(url) if keys is None else cls(url, OPERATOR, seed_file(keys, OPERATOR))

    @property
    def inbox(self) -> str:
        return "_INBOX" if self.seed_file is None else inbox_of(self.identity)

    @property
    def creates_streams(self) -> bool:
        """Whether this identity creates the streams. Otherwise it waits for them."""
        return self.seed_file is None or may_create_streams(self.identity)
