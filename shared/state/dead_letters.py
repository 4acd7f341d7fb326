"""Dead letters: reading them, and queueing their requests again."""

import re
from collections.abc import AsyncIterator
from typing import NamedTuple

from shared.bus.bus import Bus
from shared.bus.reading import StoredMessage
from shared.errors import InvalidRequest, NotFound
from shared.protocol import names, subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import DeadLetter, decode_dead_letter
from shared.protocol.requests import GenerateRequest, version_of_request
from shared.protocol.steps import decode_response_task
from shared.protocol.versions import version_header
from shared.state.any_tenant import only_tenant
from shared.state.response_status import find_any_tenants

_KEY = re.compile(r"dead:(\d{1,18})")


class StoredLetter(NamedTuple):
    key: str
    """Address of this letter: `dead:` and its number in the stream."""
    name: str
    """Id of the job, see `subjects.attempts`, or `unnamed-` and a number for a message without a
    valid id. A job may have several letters."""
    letter: DeadLetter


async def read_newest(bus: Bus, limit: int) -> AsyncIterator[StoredLetter]:
    """Yield the latest `limit` letters, the newest first."""
    first, sequence = await bus.figures.sequence_range(subjects.DEAD_STREAM)
    while limit > 0 and sequence >= first:
        stored = await bus.read_next(subjects.DEAD_STREAM, sequence)
        if stored is not None and stored.sequence == sequence:
            yield _decode(stored)
            limit -= 1
        sequence -= 1


async def find(bus: Bus, address: str) -> StoredLetter:
    """Return the letter with a key, or the latest one with a name, of any tenant.

    Raises NotFound, and InvalidRequest for a name that several tenants use.
    """
    if match := _KEY.fullmatch(address):
        stored = await bus.read_next(subjects.DEAD_STREAM, int(match[1]))
        if stored is not None and stored.sequence != int(match[1]):
            stored = None
    elif names.is_task_id(address) or names.is_job_id(address):
        stored = await bus.read_last(subjects.DEAD_STREAM, subjects.dead_of(address))
        if stored is None and names.TENANT_MARK not in address:
            letters = await bus.figures.subjects_of(subjects.DEAD_STREAM, subjects.DEAD_FILTER)
            ids = [names.split_id(subjects.last_token(letter)) for letter in letters]
            tenants = (tenant for name, tenant in ids if name == address)
            tenant = only_tenant(address, tenants, "letter")
            if tenant is not None:
                place = subjects.dead_of(names.scoped_id(address, tenant))
                stored = await bus.read_last(subjects.DEAD_STREAM, place)
    else:
        raise InvalidRequest("not the key or the name of a dead letter", field="letter")
    if stored is None:
        hint = "`pagemill dead list` shows all letters"
        raise NotFound(f"there is no dead letter {address}: {hint}", field="letter")
    return _decode(stored)


async def drop(bus: Bus, key: str) -> None:
    """Delete the letter with this key. Raises Unavailable."""
    await bus.delete(subjects.DEAD_STREAM, int(key.removeprefix("dead:")))


def _decode(stored: StoredMessage) -> StoredLetter:
    name = subjects.last_token(stored.subject)
    return StoredLetter(f"dead:{stored.sequence}", name, decode_dead_letter(stored.data))


async def requeue(bus: Bus, request_id: str, request: GenerateRequest) -> None:
    """Queue `request` again under its id, as if it were new.

    Its token logs and attempt records are removed first, and its dead letters last. Raises
    PayloadTooLarge, Overloaded or Unavailable without deleting the letters.
    """
    await bus.purge(subjects.TOKENS_STREAM, subjects.tokens(request_id))
    await bus.purge(subjects.TOKENS_STREAM, subjects.logs_beside_text(request_id))
    await bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(request_id))
    subject = subjects.request(request.model, request_id)
    headers = version_header(version_of_request(request))
    await bus.publish_without_id(subject, to_json(request), headers)
    await bus.purge(subjects.DEAD_STREAM, subjects.dead_of(request_id))


async def requeue_response(bus: Bus, letter: DeadLetter) -> str:
    """Queue a response again, and return its id. Raises InvalidRequest if it has ended.

    Its attempt records are removed first. Raises NotFound if the letter has lost its content, and
    Overloaded or Unavailable without deleting the letters.
    """
    if letter.request_id is None or not letter.input:
        raise NotFound("the dead letter does not contain the response", field="name")
    task = decode_response_task(letter.input)
    response = await find_any_tenants(bus, task.response_id)
    if response is None or response.state not in ("queued", "in_progress"):
        raise InvalidRequest("the response has ended: create another one", field="request_id")
    job_id = names.job_id("response", task.response_id, task.tenant)
    await bus.purge(subjects.ATTEMPTS_STREAM, subjects.attempts(job_id))
    await bus.publish_without_id(letter.subject, letter.input)
    await bus.purge(subjects.DEAD_STREAM, subjects.dead_of(letter.request_id))
    return task.response_id
