"""A real name server, and a system whose resolver asks it."""

import functools
import socket
import struct
import threading
from ipaddress import ip_address

import aiodns
import pytest

NXDOMAIN = 3
_HEADER = struct.Struct("!6H")


class NameServer:
    """Answers from `zone`; for other names it says nothing. None is a name that does not exist."""

    def __init__(self, zone: dict[str, list[str] | None]) -> None:
        self.zone = zone
        self.asked: list[str] = []
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("127.0.0.1", 0))
        threading.Thread(target=self._serve, daemon=True).start()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Have new resolvers ask this server."""
        port = self._socket.getsockname()[1]
        options = {"nameservers": ["127.0.0.1"], "udp_port": port, "tcp_port": port}
        monkeypatch.setattr(aiodns, "DNSResolver", functools.partial(aiodns.DNSResolver, **options))

    def close(self) -> None:
        self._socket.close()

    def _serve(self) -> None:
        while True:
            try:
                query, client = self._socket.recvfrom(4096)
            except OSError:
                return
            if (answer := self._answer(query)) is not None:
                self._socket.sendto(answer, client)

    def _answer(self, query: bytes) -> bytes | None:
        labels, at = [], _HEADER.size
        while length := query[at]:
            labels.append(query[at + 1 : at + 1 + length].decode())
            at += 1 + length
        name, question = ".".join(labels), query[_HEADER.size : at + 5]
        self.asked.append(name)
        if name not in self.zone:
            return None
        addresses = [ip_address(text) for text in self.zone[name] or ()]
        kind = struct.unpack_from("!H", query, at + 1)[0]
        data = [address.packed for address in addresses if {4: 1, 6: 28}[address.version] == kind]
        status = 0x8180 | (NXDOMAIN if self.zone[name] is None else 0)
        head = _HEADER.pack(struct.unpack_from("!H", query)[0], status, 1, len(data), 0, 0)
        return (
            head
            + question
            + b"".join(struct.pack("!3HIH", 0xC00C, kind, 1, 0, len(item)) + item for item in data)
        )
