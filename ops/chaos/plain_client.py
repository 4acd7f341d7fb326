"""Clients of tenants that share no code with Pagemill: they know the broker's protocol and JSON.

The clients of other runs use the product's own client, and so share its assumptions, such as the
form of ids. These use nats-py or a socket, and the key file that `pagemill keys add-tenant` writes.
"""

import asyncio
import base64
import contextlib
import json
import random
import socket
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import nats
import nkeys
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError

ENDS = ("finish", "error")
CALL_S = 5.0
SOCKET_S = 60.0
PAUSE_S = 0.2
# A request without progress for this long is published again under its id.
PATIENCE_S = 10.0
# The broker refuses a second message with the id of a request in flight.
IN_FLIGHT = "maximum messages per subject exceeded"
_ULID = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"


def body_of(question: str, **fields: Any) -> bytes:
    """Return a request for the demo model."""
    messages = [{"role": "user", "content": question}]
    sampling = {"temperature": 0.0, "max_tokens": 24}
    body = {"model": "demo", "messages": messages, "sampling_params": sampling}
    return json.dumps(body | fields).encode()


def random_id(rng: random.Random) -> str:
    """Return a request id in one of the forms that other systems use."""
    number = rng.getrandbits(128)
    forms = [
        str(uuid.UUID(int=number, version=4)),
        uuid.UUID(int=number).hex.upper(),
        "".join(rng.choices(_ULID, k=26)),
        f"job-2024_{number % 10**6}",
        f"{number}"[:19],
    ]
    return rng.choice(forms)


@dataclass
class Answer:
    """Everything that a client has received about one request."""

    request_id: str
    records: list[dict[str, Any]] = field(default_factory=list)
    """The stored records."""
    live: list[bytes] = field(default_factory=list)
    num_published: int = 0
    """Number of acknowledged publishes."""
    refusals: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        choices = [choice for record in self.records for choice in record.get("choices", ())]
        return "".join(choice["text"] for choice in choices)

    @property
    def error(self) -> dict[str, Any]:
        """The error at the end; empty for a finished answer."""
        error: dict[str, Any] = self.records[-1].get("error", {}) if self.records else {}
        return error

    def faults(self) -> Iterator[str]:
        """Yield what contradicts the documents in the records of a request that has ended."""
        numbers = [record["index"] for record in self.records]
        if numbers != list(range(len(numbers))):
            yield f"{self.request_id}: its records have the numbers {numbers}"
        ends = [record["type"] in ENDS for record in self.records]
        if ends.count(True) != 1 or not ends[-1]:
            yield f"{self.request_id}: its records end with {ends}"
        for data in self.live:
            record = json.loads(data)
            if record not in self.records:
                yield f"{self.request_id}: a live record is not stored: {record}"


class PlainClient:
    """A connection with the key of a tenant, or of the operator."""

    def __init__(self, nc: Client, errors: list[str]) -> None:
        self.nc = nc
        self.errors = errors
        """Errors that the broker has sent."""

    @classmethod
    async def connect(cls, url: str, key: Path, inbox_prefix: str = "_INBOX") -> Self:
        errors: list[str] = []

        async def note(error: Exception) -> None:
            errors.append(str(error))

        nc = await nats.connect(
            url,
            nkeys_seed=str(key),
            inbox_prefix=inbox_prefix,
            error_cb=note,
            max_reconnect_attempts=-1,
            reconnect_time_wait=PAUSE_S,
        )
        return cls(nc, errors)

    async def close(self) -> None:
        with contextlib.suppress(ConnectionError):  # Its broker may have ended.
            await self.nc.close()

    async def call(
        self, subject: str, data: bytes = b"", headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the reply to a request. Raises NatsError or TimeoutError."""
        reply = await self.nc.request(subject, data, timeout=CALL_S, headers=headers)
        decoded: dict[str, Any] = json.loads(reply.data)
        return decoded

    async def publish(
        self, request_id: str, body: bytes, headers: dict[str, str] | None = None
    ) -> str:
        """Publish a request. Return the refusal; empty if it is stored, or is in flight already."""
        try:
            reply = await self.call(f"pm.request.demo.{request_id}", body, headers)
        except (NatsError, TimeoutError) as error:
            return str(error) or type(error).__name__
        refusal = str(reply.get("error", {}).get("description", ""))
        return "" if refusal == IN_FLIGHT else refusal

    async def cancel(
        self, request_id: str, headers: dict[str, str] | None = None
    ) -> dict[str, Any]:
        return await self.call(f"pm.cancel.{request_id}", b"", headers)

    async def read(self, request_id: str, start: int = 0) -> dict[str, Any]:
        """Return a page of stored records, or an error."""
        return await self.call(f"pm.read.{request_id}", json.dumps({"from": start}).encode())

    async def ask(self, request_id: str, body: bytes) -> Answer:
        """Publish a request until it is accepted, and read its answer to the end."""
        answer = Answer(request_id)

        async def receive(message: Msg) -> None:
            answer.live.append(message.data)

        live = await self.nc.subscribe(f"pm.tokens.{request_id}", cb=receive)
        await self._publish_until_accepted(answer, body)
        await self._read_to_end(answer, body)
        with contextlib.suppress(NatsError):
            await live.unsubscribe()
        return answer

    async def _publish_until_accepted(self, answer: Answer, body: bytes) -> None:
        while refusal := await self.publish(answer.request_id, body):
            answer.refusals.append(refusal)
            await asyncio.sleep(PAUSE_S)
        answer.num_published += 1

    async def _read_to_end(self, answer: Answer, body: bytes) -> None:
        moved_s = time.monotonic()
        while True:
            page: dict[str, Any] = {}
            with contextlib.suppress(NatsError, TimeoutError):
                page = await self.read(answer.request_id, len(answer.records))
            if records := page.get("records"):
                answer.records += records
                moved_s = time.monotonic()
            if page.get("ended"):
                return
            if time.monotonic() - moved_s > PATIENCE_S:
                await self._publish_until_accepted(answer, body)
                moved_s = time.monotonic()
            await asyncio.sleep(PAUSE_S)


class RawConnection:
    """A connection of a client that ignores all errors of the broker."""

    def __init__(self, port: int, key: Path | None = None) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), SOCKET_S)
        self._received = b""
        self.is_accepted = key is not None and self._sign_in(key)

    def _sign_in(self, key: Path) -> bool:
        try:
            info = json.loads(self._read_until(b"\r\n").partition(b" ")[2])
            pair = nkeys.from_seed(bytearray(key.read_bytes()[:58]))
            signature = base64.urlsafe_b64encode(pair.sign(info["nonce"].encode())).rstrip(b"=")
            login = {"nkey": pair.public_key.decode(), "sig": signature.decode()}
            options = {"verbose": False, "pedantic": False, "lang": "raw", "version": "1"}
            self.send(b"CONNECT " + json.dumps(login | options).encode() + b"\r\nPING\r\n")
            return b"PONG" in self._read_until(b"\r\n")
        except (OSError, ValueError):
            return False

    @property
    def is_open(self) -> bool:
        """Whether the broker has not closed the connection, as it does without replies to pings."""
        self._socket.setblocking(False)
        try:
            while data := self._socket.recv(65_536):
                self._received += data
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            self._socket.settimeout(SOCKET_S)
        return False

    def send(self, data: bytes) -> None:
        self._socket.sendall(data)

    def _read_until(self, end: bytes) -> bytes:
        while end not in self._received:
            if not (data := self._socket.recv(65_536)):
                raise ConnectionResetError
            self._received += data
        line, _, self._received = self._received.partition(end)
        return line

    def count_errors(self) -> int:
        """Return the number of errors that the broker has sent until now."""
        self.send(b"PING\r\n")
        return self._read_until(b"PONG\r\n").count(b"-ERR")

    def close(self) -> None:
        self._socket.close()
