"""Who is asking. Keys are known by their SHA-256 alone, and compared in constant time. Pure."""

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
    """`tenant` is "" where there are no keys: everybody is nobody in particular."""

    name: str
    tenant: str
    key: ApiKey | None = None


ANONYMOUS = Caller("", "")


def make_key() -> str:
    return PREFIX + secrets.token_urlsafe(32)


def digest(key: str) -> str:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


class Keyring:
    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._keys = [(key.sha256.encode(), key) for key in keys]

    def authenticate(self, authorization: Sequence[str]) -> Caller:
        """`authorization` are the request's headers of that name. Raises InvalidKey.

        All keys are compared, whichever it is: time tells nothing about any of them.
        """
        if not self._keys:
            return ANONYMOUS
        scheme, _, given = authorization[0].partition(" ") if authorization else ("", "", "")
        if len(authorization) != 1 or scheme.lower() != "bearer":
            raise InvalidKey("an API key is needed: send it as `Authorization: Bearer KEY`")
        asked, found = digest(given.strip()).encode(), None
        for known, key in self._keys:
            if hmac.compare_digest(known, asked):
                found = key
        if found is None:
            raise InvalidKey("there is no such API key here")
        return Caller(found.name, found.name if found.tenant is None else found.tenant, found)
