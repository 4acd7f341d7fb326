"""Reads the contents of the broker after a run, and waits until the system is at rest."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import nats
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import NotFoundError

from ops.chaos.history import now
from ops.chaos.processes.cluster import ignore_error
from shared.bus.bus import Bus
from shared.bus.login import Login
from shared.protocol import subjects
from shared.protocol.messages import DeadLetter, Heartbeat
from shared.protocol.pipeline import ENDS
from shared.protocol.records import LogRecord, OutputEnds, OutputRecord
from shared.state.log_records import decode_record

SETTLE_S = 30.0
# Releases of payloads arrive after the last record, and are in heartbeats a second later.
PINS_S = 5.0
CHECK_S = 0.25
ANSWER_S = 5.0
BATCH = 1000
MAX_LEFT = 20
QUEUES = (subjects.REQUESTS_STREAM, subjects.STAGES_STREAM, subjects.BATCHJOBS_STREAM)
COUNTED = (
    *QUEUES,
    subjects.TOKENS_STREAM,
    subjects.DEAD_STREAM,
)

_letter = msgspec.msgpack.Decoder(DeadLetter).decode
_ends = msgspec.json.Decoder(OutputEnds).decode


class Logs(NamedTuple):
    """All logs of the broker, by request."""

    requests: dict[str, list[LogRecord]]
    outputs: dict[str, dict[str, list[OutputRecord]]]
    """Logs of the outputs other than the text, by name."""
    ends: dict[str, OutputEnds]
    """Lists of the outputs that have ended."""


class Store:
    """Access to the broker that does not rely on the product's own reading code."""

    def __init__(self, nc: Client, bus: Bus) -> None:
        self._nc = nc
        self._js = nc.jetstream(timeout=ANSWER_S)
        self._bus = bus

    @classmethod
    async def connect(cls, url: str) -> "Store":
        seed = Login.of_operator(url).seed_file
        nc = await nats.connect(
            url.split(","),
            max_reconnect_attempts=-1,
            error_cb=ignore_error,
            nkeys_seed=None if seed is None else str(seed),
        )
        return cls(nc, await Bus.connect(url, "chaos-dump", 30.0))

    async def close(self) -> None:
        await self._bus.close()
        await self._nc.close()

    async def settle(self, timeout_s: float = SETTLE_S) -> bool:
        """Wait until queues are empty and workers idle twice in a row; return whether they are."""
        deadline = now() + timeout_s
        num_quiet = 0
        while num_quiet < 2:
            if now() > deadline:
                return False
            await asyncio.sleep(CHECK_S)
            num_quiet = num_quiet + 1 if await self._is_at_rest() else 0
        # Heartbeats are up to a second old.
        await asyncio.sleep(1.1)
        await self._wait_for_unpinning(now() + PINS_S)
        return True

    async def _wait_for_unpinning(self, deadline: float) -> None:
        while now() < deadline:
            if not any(beat.load.get("arena_pinned") for beat in await self.beats()):
                return
            await asyncio.sleep(CHECK_S)

    async def _is_at_rest(self) -> bool:
        try:
            messages = await self.messages()
        except (TimeoutError, NatsError):
            return False
        beats = await self.beats()
        waiting = sum(messages[name] for name in QUEUES)
        return not waiting and all(not beat.load.get("held") for beat in beats)

    async def messages(self) -> dict[str, int]:
        counts = {name: (await self._js.stream_info(name)).state.messages for name in COUNTED}
        for name in await self._queues_of_tenants():
            counts[subjects.REQUESTS_STREAM] += (await self._js.stream_info(name)).state.messages
        return counts

    async def _queues_of_tenants(self) -> list[str]:
        query = json.dumps({"subject": subjects.REQUESTS_FILTER}).encode()
        reply = await self._nc.request("$JS.API.STREAM.NAMES", query, timeout=ANSWER_S)
        names = json.loads(reply.data).get("streams") or []
        return [name for name in names if name != subjects.REQUESTS_STREAM]

    async def queued_ids(self) -> list[str]:
        """Return the ids of the first requests that are still queued."""
        ids: list[str] = []
        for stream in (subjects.REQUESTS_STREAM, *await self._queues_of_tenants()):
            sequence = 0
            while len(ids) < MAX_LEFT:
                try:
                    message = await self._js.get_msg(
                        stream, seq=sequence + 1, subject=subjects.REQUESTS_FILTER, next=True
                    )
                except NotFoundError:
                    break
                ids.append(subjects.id_in(message.subject or "?"))
                sequence = message.seq or 0
        return ids

    async def consumers(self) -> dict[str, int]:
        return {name: (await self._js.stream_info(name)).state.consumer_count for name in COUNTED}

    async def beats(self) -> list[Heartbeat]:
        return await self._bus.heartbeats.read()

    async def logs(self) -> Logs:
        logs = Logs({}, {}, {})
        async for subject, data in self._read(subjects.TOKENS_STREAM, subjects.TOKENS_FILTER):
            # Subjects of other outputs have the name of the output after the request id.
            id = subjects.id_of_log(subject)
            output = subject.removeprefix(subjects.tokens(id)).split(".")[1:]
            if output == [ENDS]:
                logs.ends[id] = _ends(data)
                continue
            record = decode_record(data)
            if output and isinstance(record, OutputRecord):
                logs.outputs.setdefault(id, {}).setdefault(output[0], []).append(record)
            elif not output and isinstance(record, LogRecord):
                logs.requests.setdefault(id, []).append(record)
        return logs

    async def gateway_records(self) -> list[str]:
        """Return the ids of the requests for which gateways have stored a record."""
        read = self._read(subjects.JOBS_STREAM, subjects.JOBS_FILTER)
        return [subject.rpartition(".")[2] async for subject, _ in read]

    async def letters(self) -> list[DeadLetter]:
        read = self._read(subjects.DEAD_STREAM, subjects.DEAD_FILTER)
        return [_letter(data) async for _, data in read]

    async def _read(self, stream: str, subject: str) -> AsyncIterator[tuple[str, bytes]]:
        """Yield subject and data of every message of a stream, oldest first."""
        try:
            last = (await self._js.stream_info(stream)).state.last_seq
        except NotFoundError:
            return
        inbox = self._nc.new_inbox()
        answers = await self._nc.subscribe(inbox)
        sequence = 0
        more = True
        while more and sequence < last:
            request = {"seq": sequence + 1, "next_by_subj": subject, "batch": BATCH}
            data = json.dumps(request).encode()
            await self._nc.publish(f"$JS.API.DIRECT.GET.{stream}", data, reply=inbox)
            while (msg := await answers.next_msg(ANSWER_S)).headers is not None:
                headers = msg.headers
                if "Status" in headers:
                    assert headers["Status"] in ("204", "404"), headers
                    more = headers["Status"] == "204"
                    break
                sequence = int(headers["Nats-Sequence"])
                yield headers["Nats-Subject"], bytes(msg.data)
        await answers.unsubscribe()


async def queued_subjects(nc: Client, word: str) -> list[str]:
    """Return the subjects with a word of all queued requests and tasks. Raises NatsError."""
    queued: list[str] = []
    for filter_ in (subjects.REQUESTS_FILTER, subjects.STAGES_FILTER):
        query = json.dumps({"subject": filter_}).encode()
        reply = await nc.request("$JS.API.STREAM.NAMES", query, timeout=ANSWER_S)
        for name in json.loads(reply.data).get("streams") or []:
            query = json.dumps({"subjects_filter": filter_}).encode()
            reply = await nc.request(f"$JS.API.STREAM.INFO.{name}", query, timeout=ANSWER_S)
            state = json.loads(reply.data).get("state", {})
            queued += [subject for subject in state.get("subjects") or {} if word in subject]
    return queued


def arena_sockets() -> list[str]:
    """Return the abstract addresses of all arenas' sockets, without the leading zero byte."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return sorted({line.rpartition("@")[2] for line in lines if "@pagemill-" in line})


def shm_entries() -> list[str]:
    """Return the names of all shared memory segments of this machine."""
    folder = Path("/dev/shm")
    names = (path.name for path in folder.iterdir()) if folder.exists() else iter(())
    # Intel's OpenMP library, which the product does not use, leaves an entry for every process.
    return sorted(name for name in names if not name.startswith("__KMP_REGISTERED_LIB_"))
