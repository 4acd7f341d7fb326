"""Readers of speeches, from the bus and from a gateway, and their notes in the journal.

A gateway makes the id of a speech, and the client receives it with the first samples. So a client
cannot resume after a broken connection, and requests the whole speech again.
"""

import asyncio
import base64
from collections.abc import Awaitable, Callable

import httpx

from ops.chaos.clients.http_exchange import TRANSIENT_STATUSES, GatewayClients
from ops.chaos.gateway_api import RETRY_PAUSE_S
from ops.chaos.history import (
    Accepted,
    CancelSent,
    Journal,
    RequestSent,
    SessionFailed,
    SoundEnded,
    SoundReceived,
    SpeechNamed,
    digest_of,
    now,
)
from ops.chaos.plan import AUDIO, Planned
from shared import client
from shared.bus.bus import Bus
from shared.protocol.records import AudioChunk, OutputEnd

PATH = "/v1/audio/speech"
# After this time without a sample, the gateway is lost, or a stage for longer than the bounds.
SILENCE_S = 12.0


async def read_sound(
    bus: Bus,
    planned: Planned,
    session: int,
    journal: Journal,
    on_piece: Callable[[int], Awaitable[None]],
) -> None:
    """Note the sound of a request to its end; `on_piece` is awaited with the number of each piece.

    Raises PagemillError.
    """
    records = client.follow_output(bus, planned.id, AUDIO, timeout_s=planned.timeout_s)
    async for record in records:
        if isinstance(record, AudioChunk):
            _note(journal, planned, session, 2 * record.first_sample, base64.b64decode(record.pcm))
            await on_piece(record.index)
        elif isinstance(record, OutputEnd):
            journal.write(SoundEnded(now(), planned.id, session, record.cut))


def _note(journal: Journal, planned: Planned, session: int, at: int, sound: bytes) -> None:
    journal.write(
        SoundReceived(now(), planned.id, session, at, len(sound), digest_of(sound)),
    )


class SpeechClients(GatewayClients):
    """All clients of a run that request speeches from gateways."""

    async def run_client(self, planned: Planned, give_up_at: float) -> None:
        """Run one client until it has its speech, or has cancelled it, or its time is over."""
        self._next_gateway += 1
        number = self._next_gateway
        while now() < give_up_at:
            number += 1
            session = self._session_of(planned.id)
            self._journal.write(RequestSent(now(), planned.id, session, 0, True))
            try:
                if await self._speak(planned, session, number % len(self._gateways)):
                    return
                code, reason = "503", "unavailable"
            except TimeoutError:
                code, reason = "silence", "no sample for a while"
            except (httpx.HTTPError, OSError) as error:
                code, reason = "connection", f"{type(error).__name__}: {error}"
            self._journal.write(SessionFailed(now(), planned.id, session, code, reason))
            if planned.behaviour == "deadline":
                # Each attempt has a separate deadline, which may have ended it.
                return
            await asyncio.sleep(RETRY_PAUSE_S)

    async def _speak(self, planned: Planned, session: int, number: int) -> bool:
        """Read a speech; return False if it must be requested again.

        Raises httpx.HTTPError and TimeoutError.
        """
        request = planned.request
        body = {
            "model": request.model,
            "input": request.given_text,
            "response_format": "pcm",
            "timeout_s": planned.timeout_s,
        }
        begun, at = now(), 0
        async with asyncio.timeout(SILENCE_S) as silence:
            async with self._gateways[number].stream("POST", PATH, json=body) as answer:
                if answer.status_code in TRANSIENT_STATUSES:
                    return False
                self._journal.write(Accepted(begun, planned.id, session))
                if answer.status_code != 200:
                    reason = (await answer.aread()).decode()
                    code = str(answer.status_code)
                    self._journal.write(SessionFailed(now(), planned.id, session, code, reason))
                    return True
                bus_id = answer.headers["pagemill-request-id"]
                self._journal.write(SpeechNamed(now(), planned.id, session, bus_id))
                num_pieces = 0
                async for piece in answer.aiter_raw():
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S)
                    _note(self._journal, planned, session, at, piece)
                    at += len(piece)
                    num_pieces += 1
                    if planned.behaviour == "cancel" and num_pieces > planned.after_records:
                        self._journal.write(CancelSent(now(), planned.id, number))
                        return True
        self._journal.write(SoundEnded(now(), planned.id, session, False))
        return True
