"""The list of a tenant's files, in the order of their times."""

import secrets

from shared.batches.state import BatchState
from shared.bus.bus import Bus
from shared.protocol.batch_log import BatchEnded, Checkpoint, Validated
from shared.state import batch_files, batch_log, file_list
from shared.state.media_store import MediaUpload, StoredFile
from tests.shared.state.test_batch_log import begin, finish, reopen


async def listed(
    bus: Bus, tenant: str, start_ms: float | None = None, *, newest_first: bool = True
) -> list[str]:
    """Return the names of files and the ids of batches."""
    entries = file_list.iterate_files(bus, tenant, start_ms, newest_first=newest_first)
    return [name_of(entry) async for entry in entries]


def name_of(entry: StoredFile | BatchState) -> str:
    return entry.name if isinstance(entry, StoredFile) else entry.begun.batch_id


async def upload(bus: Bus, tenant: str) -> str:
    sending = MediaUpload(bus, tenant)
    await sending.write(secrets.token_bytes(9))
    return (await sending.finish("a.png", "vision")).name


async def upload_input(bus: Bus, tenant: str) -> str:
    expires_s = int(bus.now_ms() / 1000) + 60
    return (await batch_files.store(bus, secrets.token_bytes(9), expires_s, tenant)).name


async def test_results_are_listed_at_the_end_of_their_batch(bus: Bus) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    log, empty = await begin(bus, tenant), await begin(bus, tenant)
    names = [await upload(bus, tenant)]
    await log.append(Validated(log.next_index, 1, Checkpoint(num_lines=2, began_s=1)))
    await finish(log, 1, 2)
    names.append(await upload_input(bus, tenant))
    assert await listed(bus, tenant) == names[::-1]
    for each in (log, empty):
        await each.append(BatchEnded(each.next_index, 1, "completed", each.state.checkpoint))
    names += [log.state.begun.batch_id, await upload_input(bus, tenant), await upload(bus, tenant)]
    await upload(bus, f"{tenant}x")
    assert await listed(bus, tenant) == names[::-1]
    for number, name in enumerate(names):
        token = f"={name}" if number == 2 else name
        (time_ms,) = await file_list.times_of(bus, tenant, token)
        assert await listed(bus, tenant, time_ms) == names[number::-1]
        assert await listed(bus, tenant, time_ms, newest_first=False) == names[number:]
    await batch_log.remove_results(bus, await reopen(bus, log.state.begun))
    del names[2]
    assert await listed(bus, tenant) == names[::-1]
