"""API key authentication: only SHA-256 digests are stored, and compared in constant time. Pure."""

import hashlib
import hmac
import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from shared.config import ApiKey
from workers.gateway.http.errors import InvalidKey

PREFIX = "pm-"


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request. `tenant` is "" where no keys are configured."""

    name: str
    tenant: str
    key: ApiKey | None = None


ANONYMOUS = Caller("", "")


def make_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keyring:
    """The configured API keys."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(key.sha256.encode(), key) for key in keys]

    def authenticate(self, authorization: Sequence[str]) -> Caller:
        """Return the caller that the Authorization headers identify. Raises InvalidKey.

        All keys are compared even after a match, so that the response time reveals nothing about
        any of them.
        """
        if not self._keys:
            return ANONYMOUS
        scheme, _, key_text = authorization[0].partition(" ") if authorization else ("", "", "")
        if len(authorization) != 1 or scheme.lower() != "bearer":
            raise InvalidKey("an API key is required: send `Authorization: Bearer KEY`")
        sha256, found = digest(key_text.strip()).encode(), None
        for configured, key in self._keys:
            if hmac.compare_digest(configured, sha256):
                found = key
        if found is None:
            raise InvalidKey("the API key is not valid")
        return Caller(found.name, found.name if found.tenant is None else found.tenant, found)
