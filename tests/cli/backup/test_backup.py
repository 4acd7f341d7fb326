"""Backups of a real broker: contents, order of the copies, and refused restores."""

import asyncio
import contextlib
import json
import os
import stat
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

import pytest

from ops.chaos.processes.cluster import Cluster as BrokerCluster
from shared.bus import request_queue, streams
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.bus.snapshots import Snapshot, StreamSnapshots
from shared.config.schema import AgentConfig, BatchConfig, DeliveryConfig, NatsConfig
from shared.errors import Cancelled, InvalidRequest, NotFound
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.messages import Heartbeat
from shared.protocol.records import TokenChunk
from shared.protocol.steps import Begun, Ended, ResponseTask, decode_response_task
from shared.state.log_records import is_final
from shared.state.step_log import StepLog
from shared.state.token_log import end_request, last_record
from workers.cli.backup import restoring
from workers.cli.backup.archive import new_archive, read_archive
from workers.cli.backup.manifest import DERIVED, MANIFEST_FILE, ORDER, Manifest
from workers.cli.backup.partners import Mended
from workers.cli.backup.taking import take_backup

CHUNK = TokenChunk(0, 1, [])


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[list[EmbeddedServer]]:
    """A server with the streams, and an empty one."""
    both = [EmbeddedServer(tmp_path / name) for name in ("first", "second")]
    for server in both:
        server.start()
    yield both
    for server in both:
        server.stop()


@pytest.fixture
async def source(servers: list[EmbeddedServer]) -> AsyncIterator[Bus]:
    bus = await Bus.connect(servers[0].url, "source")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    yield bus
    await bus.close()


@pytest.fixture
async def target(servers: list[EmbeddedServer]) -> AsyncIterator[Bus]:
    bus = await Bus.connect(servers[1].url, "target")
    yield bus
    await bus.close()


def ignore(_: str, __: int, ___: int) -> None:
    pass


async def back_up(bus: Bus, path: Path) -> Manifest:
    with new_archive(path) as archive:
        return await take_backup(bus, archive, ignore)


async def restore(bus: Bus, path: Path, *, replace: bool = False, replicas: int = 1) -> Mended:
    with read_archive(path) as archive:
        manifest = restoring.check_archive(archive)
        existing = await restoring.check_target(bus, replace=replace)
        return await restoring.restore(bus, archive, manifest, existing, replicas, ignore)


async def ask(bus: Bus, request_id: str) -> None:
    body = to_json({"model": "m", "prompt": "?"})
    await bus.publish_without_id(subjects.request("m", request_id), body)


async def begin_log(bus: Bus, request_id: str) -> None:
    await bus.append(subjects.append(request_id), to_json(CHUNK), 0)


def test_every_stream_is_copied_or_made_again() -> None:
    delivery = DeliveryConfig()
    configs = streams.durable_streams(delivery, AgentConfig(), BatchConfig(), 1)
    configs += streams.volatile_streams(delivery, 1)
    assert sorted([*ORDER, *DERIVED]) == sorted(config.name or "" for config in configs)


@pytest.mark.parametrize("name", ["backup", "backup.zip"])
async def test_messages_keep_subject_sequence_and_time(
    source: Bus, target: Bus, tmp_path: Path, name: str
) -> None:
    await begin_log(source, "r1")
    await begin_log(source, "r2@acme")
    await ask(source, "r1")
    await ask(source, "r2")
    await source.publish_without_id(subjects.media("0" * 64), os.urandom(3 * 2**18))
    manifest = await back_up(source, tmp_path / name)
    assert [part.stream for part in manifest.parts] == list(ORDER)
    assert {part.stream: part.messages for part in manifest.parts if part.messages} == {
        subjects.REQUESTS_STREAM: 2,
        subjects.TOKENS_STREAM: 2,
        subjects.MEDIA_STREAM: 1,
    }
    queued_from, _ = await source.figures.sequence_range(subjects.REQUESTS_STREAM)
    await restore(target, tmp_path / name)
    for stream in (subjects.TOKENS_STREAM, subjects.MEDIA_STREAM):
        assert await target.read(stream, ">") == await source.read(stream, ">")
    queued = [request async for request in request_queue.queued_requests(target)]
    assert [request.request_id for request in queued] == ["r1", "r2"]
    # The next request does not get a sequence that an older one has had.
    await ask(target, "r3")
    first, last = await target.figures.sequence_range(subjects.REQUESTS_STREAM)
    assert (first, last) == (queued_from, queued_from + 2)


async def test_the_requests_of_a_tenant_with_a_key_are_part_of_a_backup(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    subject = f"pm.request.@acme.{subjects.WITH_KEY}.demo.r1"
    for bus in (source, target):
        for config in streams.streams_of_tenant("acme", NatsConfig(), DeliveryConfig()):
            await bus.connection.js.add_stream(config)
    await source.publish_without_id(subject, b"{}")
    await target.publish_without_id(subject, b"{}")
    await begin_log(source, "r1@acme")
    manifest = await back_up(source, tmp_path / "backup")
    # An empty queue needs no backup.
    assert {part.stream for part in manifest.parts} == {*ORDER, "REQUESTS_acme"}
    await restore(target, tmp_path / "backup", replace=True)
    (queued,) = [request async for request in request_queue.queued_requests(target)]
    assert (queued.place.stream, queued.request_id) == ("REQUESTS_acme", "r1@acme")
    assert len(await target.read(subjects.TOKENS_STREAM, subjects.TOKENS_FILTER)) == 1
    assert await request_queue.streams_of_tenants(target) == ["REQUESTS_acme"]


@pytest.mark.parametrize("name", ["backup", "backup.zip"])
async def test_only_its_owner_reads_a_backup(source: Bus, tmp_path: Path, name: str) -> None:
    await back_up(source, tmp_path / name)
    files = [tmp_path / name, *(tmp_path / name).glob("*")]
    assert {stat.S_IMODE(file.stat().st_mode) & 0o077 for file in files} == {0}
    with pytest.raises(InvalidRequest, match="exists already"):
        await back_up(source, tmp_path / name)


async def test_a_claimed_request_is_delivered_again(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    queue = subjects.REQUESTS_STREAM, subjects.REQUESTS_CONSUMER, subjects.REQUESTS_FILTER
    await ask(source, "r1")
    before = await source.queues.consume(*queue, 1, 1000.0)
    await before.next()
    await back_up(source, tmp_path / "backup")
    await restore(target, tmp_path / "backup")
    after = await target.queues.consume(*queue, 1, 1000.0)
    async with asyncio.timeout(10):
        delivery = await after.next()
    assert (subjects.id_in(delivery.subject), delivery.attempt) == ("r1", 1)


async def test_a_broker_without_streams_has_no_backup(target: Bus, tmp_path: Path) -> None:
    for name in ("backup", "backup.zip"):
        with pytest.raises(NotFound, match="nothing to back up"):
            await back_up(target, tmp_path / name)
    assert sorted(os.listdir(tmp_path)) == ["first", "second"]


def damage(archive: Path, stream: str) -> None:
    file = archive / f"{stream}.snapshot"
    file.write_bytes(file.read_bytes()[:-1] + b"!")


def change(archive: Path, **fields: object) -> None:
    file = archive / MANIFEST_FILE
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


@pytest.mark.parametrize(
    ("harm", "named"),
    [
        (lambda path: damage(path, "TOKENS"), r"TOKENS.snapshot is damaged: it has \d+ bytes"),
        (lambda path: (path / "DEAD.snapshot").unlink(), "DEAD.snapshot is missing"),
        (lambda path: (path / MANIFEST_FILE).unlink(), "manifest.json is missing"),
        (lambda path: (path / MANIFEST_FILE).write_text("{"), "manifest.json: "),
        (lambda path: change(path, format=2), "format 2; this version reads format 1"),
    ],
    ids=["changed", "a part is missing", "no manifest", "no JSON", "a newer format"],
)
async def test_a_damaged_backup_changes_nothing(
    source: Bus, target: Bus, tmp_path: Path, harm: Callable[[Path], object], named: str
) -> None:
    await target.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    await begin_log(target, "kept")
    await back_up(source, tmp_path / "backup")
    harm(tmp_path / "backup")
    with pytest.raises(InvalidRequest, match=named):
        await restore(target, tmp_path / "backup", replace=True)
    assert len(await target.read(subjects.TOKENS_STREAM, ">")) == 1


async def test_a_manifest_names_no_other_stream_or_file(source: Bus, tmp_path: Path) -> None:
    manifest = await back_up(source, tmp_path / "backup")
    for foreign in ({"stream": "OTHER"}, {"file": "../secret"}):
        parts = json.loads(to_json(manifest.parts))
        parts[0] |= foreign
        change(tmp_path / "backup", parts=parts)
        with (
            read_archive(tmp_path / "backup") as archive,
            pytest.raises(InvalidRequest, match="is not part of a backup"),
        ):
            restoring.check_archive(archive)


async def test_a_file_that_is_no_backup_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no backup")
    for name in ("text", "missing"):
        with pytest.raises(InvalidRequest, match="cannot be read"), read_archive(tmp_path / name):
            pass


async def test_streams_are_replaced_only_if_asked_for(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    await begin_log(source, "new")
    await back_up(source, tmp_path / "backup.zip")
    await target.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    await begin_log(target, "old")
    with pytest.raises(InvalidRequest, match=r"has streams of Pagemill \(.*TOKENS.*--replace"):
        await restore(target, tmp_path / "backup.zip")
    await restore(target, tmp_path / "backup.zip", replace=True)
    assert await StreamSnapshots(target).streams_among([*ORDER, *DERIVED]) == list(ORDER)
    left = await target.figures.subjects_of(subjects.TOKENS_STREAM, subjects.TOKENS_FILTER)
    assert left == [subjects.tokens("new")]


async def test_no_cluster_is_replaced_under_its_workers(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    await back_up(source, tmp_path / "backup")
    await target.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    beat = Heartbeat("engine", "engine-1", "0", 1, [], {})
    await target.heartbeats.publish("engine-1", to_json(beat))
    with pytest.raises(InvalidRequest, match=r"1 workers run \(engine-1\): stop all of them"):
        await restore(target, tmp_path / "backup", replace=True)


@contextlib.contextmanager
def between(stream: str, happens: Callable[[], Awaitable[None]]) -> Iterator[None]:
    """Run `happens` in a working cluster, just before a stream is copied."""
    copy = StreamSnapshots.open_snapshot

    @contextlib.asynccontextmanager
    async def open_snapshot(
        snapshots: StreamSnapshots, name: str, *, with_consumers: bool
    ) -> AsyncIterator[Snapshot]:
        if name == stream:
            await happens()
        async with copy(snapshots, name, with_consumers=with_consumers) as snapshot:
            yield snapshot

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StreamSnapshots, "open_snapshot", open_snapshot)
        yield


@pytest.mark.parametrize("stream", ["RESPONSES", "REQUESTS", "TOKENS", "DEAD"])
async def test_a_request_that_ends_meanwhile_is_queued_or_has_its_end(
    source: Bus, target: Bus, tmp_path: Path, stream: str
) -> None:
    await ask(source, "r1")
    await begin_log(source, "r1")

    async def end() -> None:
        await end_request(source, "r1", 1, Cancelled("for the test"), [])
        await source.delete(subjects.REQUESTS_STREAM, 1)

    with between(stream, end):
        await back_up(source, tmp_path / "backup")
    await restore(target, tmp_path / "backup")
    queued = [request.request_id async for request in request_queue.queued_requests(target)]
    assert queued == ["r1"] or is_final(await last_record(target, "r1"))


async def test_a_log_without_a_queued_request_does_not_stay_open(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    await ask(source, "queued")

    async def accept_more() -> None:
        for request_id in ("queued", "late", "late-and-ended"):
            await begin_log(source, request_id)
        await source.append(subjects.append("late", "audio"), to_json(CHUNK), 0)
        await end_request(source, "late-and-ended", 1, Cancelled("for the test"), [])

    with between(subjects.TOKENS_STREAM, accept_more):
        await back_up(source, tmp_path / "backup")
    assert await restore(target, tmp_path / "backup") == Mended(1, 0)
    left = await target.figures.subjects_of(subjects.TOKENS_STREAM, subjects.TOKENS_FILTER)
    assert left == [subjects.tokens("late-and-ended"), subjects.tokens("queued")]


async def test_a_response_that_was_not_queued_continues_after_a_restore(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    async def accept_more() -> None:
        for name in ("resp_late", "resp_ended"):
            log = StepLog(source, "acme", name)
            await log.append(Begun(0, 1, "m", "acme", [], {}))
        await log.append(Ended(0, "cancelled", 1))

    with between(subjects.STEPS_STREAM, accept_more):
        await back_up(source, tmp_path / "backup")
    assert await restore(target, tmp_path / "backup") == Mended(0, 1)
    agents = await target.queues.consume(
        subjects.RESPONSES_STREAM, subjects.RESPONSES_CONSUMER, subjects.RESPONSES_FILTER, 2, 9.0
    )
    async with asyncio.timeout(10):
        delivery = await agents.next()
    assert decode_response_task(delivery.data) == ResponseTask("resp_late", "acme")


async def test_a_backup_goes_from_one_broker_to_three_and_back(
    source: Bus, target: Bus, tmp_path: Path
) -> None:
    await ask(source, "r1")
    await begin_log(source, "r1")
    await back_up(source, tmp_path / "of-one")
    brokers = BrokerCluster(tmp_path / "brokers")
    await brokers.start()
    three = await Bus.connect(brokers.url, "three")
    try:
        await restore(three, tmp_path / "of-one", replicas=3)
        # Coordinators find the streams as they want them.
        await three.streams.prepare(NatsConfig(replicas=3), DeliveryConfig())
        await ask(three, "r2")
        await back_up(three, tmp_path / "of-three")
    finally:
        await three.close()
        await brokers.stop()
    await restore(target, tmp_path / "of-three")
    assert [request.request_id async for request in request_queue.queued_requests(target)] == [
        "r1",
        "r2",
    ]
    logs = await source.read(subjects.TOKENS_STREAM, ">")
    assert await target.read(subjects.TOKENS_STREAM, ">") == logs
