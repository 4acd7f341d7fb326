"""Host and Origin headers that a gateway accepts. Pure.

A gateway without keys trusts every client that can connect, so on a loopback address the web pages
that a user opens are its attackers. A page has two ways to reach the gateway: a host name that its
author points to 127.0.0.1 (DNS rebinding), and a form or another request without a preflight from
its own site. Both differ from the user's own requests in the headers Host and Origin, which no page
can forge.
"""

from collections.abc import Sequence

from shared.config.schema import ApiKey, GatewayConfig
from shared.net.ip_policy import is_loopback_host
from workers.gateway.http.errors import ForeignHost, ForeignOrigin

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class OriginPolicy:
    """Checks the headers of each request if there are no keys, or if `gateway.hosts` is set."""

    def __init__(self, config: GatewayConfig) -> None:
        self._is_local = is_loopback_host(config.listen)
        self._hosts = set(config.hosts)
        if config.public_url is not None:
            self._hosts.add(_host_of(_authority_of(config.public_url)))
        self._origins = set(config.cors_origins)
        self._lists_hosts = bool(config.hosts)
        self.set_keys(config.api_keys)

    def set_keys(self, keys: Sequence[ApiKey]) -> None:
        """Take over the keys of a changed configuration."""
        self._checks_origins = not keys
        self._checks_hosts = self._lists_hosts or (not keys and self._is_local)

    def check(self, method: str, host: str | None, origin: str | None) -> None:
        """Raises ForeignHost or ForeignOrigin.

        A missing header is accepted. Browsers always send Host, and Origin with unsafe methods.
        """
        if self._checks_hosts and host is not None and not self._is_own(host):
            raise ForeignHost(
                "this gateway does not serve this host name: gateway.hosts lists further names",
                field="Host",
            )
        if self._checks_origins and origin is not None and method not in SAFE_METHODS:
            site = _authority_of(origin)
            is_same = site != "" and site == host
            if not (is_same or origin in self._origins or _host_of(site) in self._hosts):
                raise ForeignOrigin(
                    "pages of this site may not use this gateway: its configuration lists the sites"
                    " that may in gateway.cors_origins",
                    field="Origin",
                )

    def _is_own(self, host: str) -> bool:
        name = _host_of(host)
        return is_loopback_host(name) or name in self._hosts


def _authority_of(url: str) -> str:
    return url.partition("://")[2].partition("/")[0]


def _host_of(authority: str) -> str:
    """Return the name in `name:port`, and the address in `[address]:port`; "" if there is none."""
    if authority.startswith("["):
        address, bracket, port = authority[1:].partition("]")
        return address.lower() if bracket and (not port or _is_port(port)) else ""
    name, colon, port = authority.partition(":")
    return name.lower() if not colon or _is_port(f":{port}") else ""


def _is_port(text: str) -> bool:
    return text.startswith(":") and (text[1:] == "" or text[1:].isdecimal())
