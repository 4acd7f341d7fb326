"""Listening sockets: addresses in use, of other machines, and without permission."""

import os
import random
import socket
from collections.abc import Iterator
from functools import partial

import pytest

from shared.errors import ConfigError, PagemillError, Unavailable
from shared.net.listening import bind, listen, listen_on_first


@pytest.fixture
def taken() -> Iterator[int]:
    """A port at which another socket listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def test_a_port_in_use_may_be_free_later(taken: int) -> None:
    with pytest.raises(Unavailable) as refused:
        bind("gateway", "127.0.0.1", taken)
    assert refused.value.field == "gateway.port"
    assert refused.value.message == (
        f"gateway.port: port {taken} of 127.0.0.1 is in use: is Pagemill already running?"
        " Stop the process that has it open, or set another port"
    )


def test_the_second_of_two_bound_sockets_does_not_listen() -> None:
    with bind("gateway", "127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        second = bind("gateway", "127.0.0.1", port)
        listen("gateway", first)
        with pytest.raises(Unavailable, match=f"port {port} of 127.0.0.1 is in use"):
            listen("gateway", second)
        assert second.fileno() == -1


def test_the_last_of_some_ports_is_used_and_then_none() -> None:
    # At an address of its own, no other test has a port.
    host = ".".join(["127", *(str(random.randint(1, 254)) for _ in range(3))])
    with (
        socket.create_server((host, 9000)),
        listen_on_first("metrics", host, 9000, 2) as listener,
    ):
        assert listener.getsockname()[1] == 9001
        with pytest.raises(Unavailable, match="none of the ports 9000 to 9001 is free"):
            listen_on_first("metrics", host, 9000, 2)


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_the_machine_lacks_may_come(host: str) -> None:
    """The network of a machine that starts may come up after its services."""
    for open_socket in (bind, partial(listen_on_first, num_ports=3)):
        with pytest.raises(Unavailable, match=f"cannot listen at {host}") as refused:
            open_socket("metrics", host, 0)
        assert refused.value.field == "metrics.listen"


def test_a_privileged_port_is_a_fault_of_the_configuration() -> None:
    """The child process has no right to it; the test itself may run as root."""
    ours, theirs = socket.socketpair()
    if (pid := os.fork()) == 0:
        try:
            if os.geteuid() == 0:
                os.setuid(65534)
            bind("gateway", "127.0.0.1", 81)
        except PagemillError as error:
            theirs.send(f"{type(error).__name__} {error.field}".encode())
        finally:
            os._exit(0)
    theirs.close()
    with ours:
        assert ours.recv(100).decode() == f"{ConfigError.__name__} gateway.port"
    os.waitpid(pid, 0)
