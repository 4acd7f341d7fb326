"""Replies to clients that read stored answers, the status of requests, results of batches, and
stored files.

Tenants take turns, their calls have a limit, and calls wait while requests are admitted, so that
many readers do not delay the queues of a coordinator. A tenant's clients reach only requests and
files of their tenant, because the broker adds it to their subjects.
"""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial

from msgspec.structs import replace

from shared.bus.bus import HEADER_BYTES, Bus
from shared.bus.messaging import GroupResponder
from shared.errors import InvalidRequest, MediaNotFound, NotFound, Overloaded
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.reading import (
    MAX_REQUEST_BYTES,
    FileRequest,
    LogPage,
    ReadRequest,
    ResultsRequest,
    decode_file_request,
    decode_read_request,
    decode_results_request,
)
from shared.stage.calls import reply_of
from shared.state import batch_log, media_store, request_status
from shared.state.log_pages import read_page, read_page_of
from shared.tenants.fair_turns import FairTurns
from workers.coordinator.precedence import Precedence

# A page and its messages take at most a few MiB of memory. More would delay other work longer.
MAX_RUNNING = 1
# Limit on calls in flight. At some ten milliseconds each, the last call waits about a second.
MAX_HELD = 64
# Delay of a refusal. A client that repeats its call at once would take the time of the event loop.
REFUSAL_S = 1.0
# Further refusals are not delayed, because each takes memory until then.
MAX_REFUSALS = 1024

Answer = Callable[[str, bytes], Awaitable[bytes]]
"""Function from a subject, which ends with a name, and a request to the answer."""


class Reading:
    """Answers the calls of `shared.protocol.reading`."""

    def __init__(self, bus: Bus, max_reads: int, precedence: Precedence) -> None:
        """`max_reads` is the limit on the calls of a tenant, see `delivery.tenant_reads`."""
        self._bus = bus
        self._max_reads = max_reads
        self._precedence = precedence
        self._num_reads: Counter[str] = Counter()
        """Number of calls in flight by tenant."""
        self._num_refusals = 0
        self._turns = FairTurns(MAX_RUNNING, "reads wait for this coordinator")
        self._responders: list[GroupResponder] = []

    async def start(self) -> None:
        answers: dict[str, Answer] = {
            "read": self._read_log,
            "state": self._find_state,
            "results": self._read_results,
            "file": self._read_file,
        }
        for call in subjects.READING_CALLS:
            reply = partial(self._reply, answers[call])
            responder = await self._bus.add_group_responder(
                subjects.reading_filter(call), subjects.COORDINATORS_GROUP, reply
            )
            self._responders.append(responder)

    async def stop(self, drain_s: float) -> None:
        """Finish the calls that have arrived, for at most `drain_s`."""
        await asyncio.gather(*(responder.stop(drain_s) for responder in self._responders))

    async def _reply(self, answer: Answer, data: bytes, _: str | None, subject: str) -> bytes:
        return await reply_of(self._answer(answer, subject, data))

    async def _answer(self, answer: Answer, subject: str, data: bytes) -> bytes:
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidRequest(
                f"the request has {len(data)} bytes, the limit is {MAX_REQUEST_BYTES}"
            )
        _, tenant = names.split_id(subjects.id_in(subject))
        if self._num_reads[tenant] >= self._max_reads:
            await self._delay_refusal()
            raise Overloaded(
                f"{self._max_reads} reads of this tenant are in flight, which is the limit of each"
                " coordinator (delivery.tenant_reads): send the next one after a reply"
            )
        self._num_reads[tenant] += 1
        try:
            async with self._turns.turn(tenant, MAX_HELD):
                await self._precedence.wait()
                return await answer(subject, data)
        finally:
            self._num_reads[tenant] -= 1
            if not self._num_reads[tenant]:
                del self._num_reads[tenant]

    async def _delay_refusal(self) -> None:
        if self._num_refusals < MAX_REFUSALS:
            self._num_refusals += 1
            try:
                await asyncio.sleep(REFUSAL_S)
            finally:
                self._num_refusals -= 1

    async def _read_log(self, subject: str, data: bytes) -> bytes:
        request_id = _request_id_in(subject)
        request = decode_read_request.read(data) if data else ReadRequest()
        if not names.is_name(request.output):
            raise InvalidRequest(f"output {names.NAME_RULE}", field="output")
        # Each record was stored as one message of at most this size. The rest of the page is small.
        max_bytes = min(request.max_bytes, self._bus.max_payload - HEADER_BYTES)
        where = self._bus, request_id, request.output, request.start
        read = partial(read_page, *where, max_bytes, self._precedence.wait)
        page = await read()
        if page is None:
            status = await request_status.find(self._bus, request_id)
            if status.state == "unknown":
                raise NotFound(
                    f"there is no request with this id: {status.why}", field="request_id"
                )
            # The log may have been written since it was read.
            page = await read() if status.has_ended else LogPage([], request.start, ended=False)
        if page is None:
            raise NotFound(f"this request has no output {request.output!r}", field="output")
        return to_json(page)

    async def _find_state(self, subject: str, data: bytes) -> bytes:
        request_id = _request_id_in(subject)
        if data:
            raise InvalidRequest(f"the request has {len(data)} bytes, and must be empty")
        status = await request_status.find(self._bus, request_id)
        # The broker has added the tenant of a tenant's client.
        return to_json(replace(status, request_id=subjects.last_token(subject)))

    async def _read_results(self, subject: str, data: bytes) -> bytes:
        batch_id, tenant = names.split_id(subjects.id_in(subject))
        request = decode_results_request.read(data) if data else ResultsRequest()
        batch = await batch_log.open_batch(self._bus, tenant, batch_id)
        if batch is None:
            raise NotFound("there is no batch with this id, or it has expired", field="batch_id")
        max_bytes = min(request.max_bytes, self._bus.max_payload - HEADER_BYTES)
        log = batch_log.paged(tenant, batch_id)
        page = await read_page_of(self._bus, log, request.start, max_bytes, self._precedence.wait)
        return to_json(page or LogPage([], request.start, ended=False))

    async def _read_file(self, subject: str, data: bytes) -> bytes:
        name = subjects.id_in(subject)
        digest, tenant = names.split_id(name)
        is_digest = media_store.parse_media_url(media_store.media_url(digest)) == digest
        if not (is_digest and names.is_scoped_id(name)):
            raise InvalidRequest(
                "a file is named by the SHA-256 of its bytes, 64 hexadecimal digits in lower case",
                field="sha256",
            )
        request = decode_file_request.read(data) if data else FileRequest()
        # Base64 has four characters for three bytes.
        max_bytes = min(request.max_bytes, (self._bus.max_payload - HEADER_BYTES) // 4 * 3)
        page = await media_store.read_page(self._bus, digest, request.start, max_bytes, tenant)
        if page is None:
            raise MediaNotFound("this file is not stored, or not complete", field="sha256")
        return to_json(page)


def _request_id_in(subject: str) -> str:
    request_id = subjects.id_in(subject)
    if not names.is_scoped_id(request_id):
        raise InvalidRequest(f"a request id {names.REQUEST_ID_RULE}", field="request_id")
    return request_id
