"""Publishing: stored once by message id, appended with fencing, or as a transient notification."""

import contextlib
from collections.abc import Mapping

from nats.errors import Error as NatsError
from nats.js import api
from nats.js.errors import APIError, NoStreamResponseError

from shared.bus.connection import BROKER_DEADLINE_S, FIRST_RETRY_S, BusPart, retry_until
from shared.bus.consumer import acknowledge
from shared.errors import Fenced, Overloaded, PayloadTooLarge
from shared.protocol.requests import tenant_header
from shared.protocol.versions import OLDEST_VERSION, version_header

# The headers share the server's limit with the payload.
HEADER_BYTES = 1024

# Server error codes (nats-server's errors.json).
_WRONG_LAST_SEQUENCE = 10071
_STORE_FAILED = 10077


class Publisher(BusPart):
    """The publishing part of `Bus`."""

    @property
    def max_payload(self) -> int:
        """The most bytes that one message may have."""
        return self._nc.max_payload

    def check_size(self, data: bytes, subject: str) -> None:
        """Raises PayloadTooLarge if `data` does not fit into one message."""
        limit = self.max_payload - HEADER_BYTES
        if len(data) > limit:
            error = PayloadTooLarge(
                f"the message for {subject} has {len(data)} bytes, the limit is {limit}:"
                " send fewer or smaller media",
                field="messages",
            )
            error.reported = True
            raise error

    async def publish(
        self,
        subject: str,
        data: bytes,
        msg_id: str,
        tenant: str = "",
        version: int = OLDEST_VERSION,
    ) -> bool:
        """Store `data` once. Return True if a message with this id was stored before.

        `version` is what a reader needs, for a message that does not say so itself.

        An attempt without an ack may have been stored all the same: it is repeated under the same
        id until BROKER_DEADLINE_S, then Unavailable is raised.
        """
        self.check_size(data, subject)
        headers = {"Nats-Msg-Id": msg_id} | tenant_header(tenant) | version_header(version)
        ack = await self._publish(subject, data, headers)
        return ack is None or bool(ack.duplicate)

    async def publish_without_id(
        self, subject: str, data: bytes, headers: dict[str, str] | None = None
    ) -> None:
        """Store `data`. It may be stored twice if the broker fails meanwhile."""
        self.check_size(data, subject)
        await self._publish(subject, data, headers or {})

    async def append(
        self,
        subject: str,
        data: bytes,
        last_sequence: int,
        ttl_s: float | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> int:
        """Store `data` if `last_sequence` is still the last one of its subject.

        Return the sequence of `data`. It expires after `ttl_s`, or with its stream's maximal age.
        Raises Fenced when another writer was faster.
        """
        self.check_size(data, subject)
        fence = {"Nats-Expected-Last-Subject-Sequence": str(last_sequence)} | dict(headers or {})
        if ttl_s is not None:
            fence["Nats-TTL"] = f"{max(1, round(ttl_s))}s"
        ack = await self._publish(subject, data, fence)
        assert ack is not None, "a stream of logs has no limit on messages per subject"
        return ack.seq

    async def notify(self, subject: str) -> None:
        """Publish an empty message to current subscribers. It is not stored and may be lost."""
        with contextlib.suppress(NatsError):
            await self._nc.publish(subject, b"")

    async def acknowledge(self, receipt: str) -> bool:
        """Acknowledge another worker's delivery. Return whether the server has confirmed it."""
        return await acknowledge(self._nc, receipt)

    async def _publish(
        self, subject: str, data: bytes, headers: dict[str, str]
    ) -> api.PubAck | None:
        """Return the ack, or None if the stream accepts no second message of this subject.

        Raises Fenced, Overloaded, or Unavailable after BROKER_DEADLINE_S.
        """

        async def attempt() -> api.PubAck | None:
            try:
                return await self._js.publish(subject, data, headers=headers)
            except NoStreamResponseError:
                self.check_streams()
                raise
            except APIError as error:
                code, reason = error.err_code, error.description or ""
                if code == _WRONG_LAST_SEQUENCE:
                    raise Fenced(f"another writer appended to {subject}: {reason}") from error
                if code == _STORE_FAILED and "per subject" in reason:
                    return None
                if code == _STORE_FAILED and "maximum" in reason:
                    raise Overloaded(
                        f"the queue of {subject} is full ({reason});"
                        f" try again in {Overloaded.retry_after_s:g} s"
                    ) from error
                raise

        # All other failures are transient: no reply, no leader, no room, or (in a cluster) the same
        # message or its predecessor is just being stored.
        return await retry_until(
            BROKER_DEADLINE_S,
            attempt,
            (NatsError,),
            "the broker did not store a message",
            FIRST_RETRY_S,
        )
