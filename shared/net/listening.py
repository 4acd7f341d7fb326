"""Listening sockets: an address that cannot be used ends in an error that names its setting."""

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager

from shared.errors import ConfigError, Unavailable

BACKLOG = 128
_NOT_PERMITTED = (errno.EACCES, errno.EPERM, errno.EAFNOSUPPORT)


def bind(section: str, host: str, port: int, remedy: str = "set another port") -> socket.socket:
    """Return a socket that is bound to an address of the machine. It does not listen yet.

    Port 0 selects a free port. `section` is the section of the configuration with the settings
    `listen` and `port`. Raises Unavailable for an address that may be free later, and ConfigError
    for one that the process may not use.
    """
    with _named(section, host, port, remedy):
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                # `::` also stands for all addresses of IPv4.
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            listener.bind(address)
        except BaseException:
            listener.close()
            raise
    return listener


def listen(section: str, listener: socket.socket, backlog: int = BACKLOG) -> None:
    """Accept connections on a bound socket. Raises Unavailable, and then closes the socket.

    The system lets two sockets bind one address. Only the first of them can listen.
    """
    host, port, *_ = listener.getsockname()
    try:
        with _named(section, host, port, "set another port"):
            listener.listen(backlog)
    except BaseException:
        listener.close()
        raise


def listen_on_first(section: str, host: str, port: int, num_ports: int) -> socket.socket:
    """Return a socket that listens on the first free port of `num_ports` ports from `port` on.

    Raises the errors of `bind`.
    """
    last = min(port + num_ports - 1, 65535) if port else 0
    remedy = "set another port"
    if last > port:
        remedy += f": none of the ports {port} to {last} is free"
    for candidate in range(port, last):
        try:
            listener = bind(section, host, candidate)
            listen(section, listener)
        except Unavailable as error:
            if not is_in_use(error):
                raise
        else:
            return listener
    listener = bind(section, host, last, remedy)
    listen(section, listener)
    return listener


def is_in_use(error: Unavailable) -> bool:
    """Return whether the address of an error of `bind` has another listener."""
    return isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE


@contextmanager
def _named(section: str, host: str, port: int, remedy: str) -> Iterator[None]:
    """Raise a typed error for each error of the system about an address."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or os.strerror(error.errno or 0)
        if error.errno == errno.EADDRINUSE:
            raise Unavailable(
                f"{section}.port: port {port} of {host} is in use: is Pagemill already running?"
                f" Stop the process that has it open, or {remedy}",
                field=f"{section}.port",
            ) from error
        if error.errno in _NOT_PERMITTED:
            raise ConfigError(
                f"{section}.port: this process may not listen at {host}, port {port}:"
                f" {reason}; {remedy}",
                field=f"{section}.port",
            ) from error
        # A name may resolve later, and a network may come up later: a machine may be starting.
        raise Unavailable(
            f"{section}.listen: cannot listen at {host}, port {port}: {reason}; set an address of"
            " this machine",
            field=f"{section}.listen",
        ) from error
