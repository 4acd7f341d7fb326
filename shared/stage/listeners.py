"""Listening sockets of a worker. They are bound before the worker loads anything."""

import socket
from typing import Literal

from shared.config.schema import METRICS_PORTS, BlobsConfig, Config, GatewayConfig, MetricsConfig
from shared.net.listening import bind, listen_on_first

Section = Literal["gateway", "metrics", "blobs"]
"""Section of the configuration with the settings `listen` and `port`."""


class Listeners:
    """The sockets of one process, by section. Sections without an address have none."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._bound: dict[Section, socket.socket | None] = {}

    def bind(self, *sections: Section) -> None:
        """Bind the sockets of these sections. Raises Unavailable or ConfigError."""
        for section in sections:
            self._bound[section] = self._open(section)

    def take(self, section: Section) -> socket.socket | None:
        """Return the socket of a section, which is bound now if it is not yet.

        The caller closes it. Raises Unavailable or ConfigError.
        """
        if section not in self._bound:
            self.bind(section)
        return self._bound.pop(section)

    def close(self) -> None:
        """Close the sockets that were not taken."""
        for listener in self._bound.values():
            if listener is not None:
                listener.close()
        self._bound.clear()

    def _open(self, section: Section) -> socket.socket | None:
        settings: GatewayConfig | MetricsConfig | BlobsConfig = getattr(self._config, section)
        host, port = settings.listen, settings.port
        if host is None:
            return None
        if section == "metrics":
            # Workers of one machine look for a free port at one time.
            return listen_on_first(section, host, port, METRICS_PORTS)
        return bind(section, host, port)


def check_address(config: Config, section: Section) -> None:
    """Check that the address of a section is free. Raises Unavailable or ConfigError."""
    listeners = Listeners(config)
    try:
        listeners.bind(section)
    finally:
        listeners.close()
