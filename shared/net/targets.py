"""URLs of servers named by clients, parsed strictly and once. Pure."""

import re
from typing import NamedTuple
from urllib.parse import urlsplit

MAX_URL_LEN = 8192
_PRINTABLE = re.compile(r"[!-~]+")
_HOST = re.compile(r"[a-z0-9]([a-z0-9.-]*[a-z0-9])?\.?|\[[0-9a-f:.]+\]")
_PORTS = {"http": 80, "https": 443}


class Target(NamedTuple):
    scheme: str
    host: str
    """Lower case; an IPv6 address without its brackets."""
    port: int
    path: str
    """Path with the query."""

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


def parse_target(url: str) -> Target | None:
    """Return the parts of an http or https URL; None if other parsers could read it differently."""
    if len(url) > MAX_URL_LEN or not _PRINTABLE.fullmatch(url) or "\\" in url:
        return None
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return None
    authority = parts.netloc.lower()
    host = authority if port is None else authority.rpartition(":")[0]
    if parts.scheme not in _PORTS or not _HOST.fullmatch(host) or port == 0:
        return None
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    return Target(parts.scheme, host.strip("[]"), port or _PORTS[parts.scheme], path)
