"""The command `pagemill batch`, with a batch that the test runs itself."""

import asyncio
import json
import os
import secrets
import signal
from pathlib import Path

import pytest

from shared.batches.state import FinishedLine, checkpoint_after, results_of
from shared.bus.bus import Bus
from shared.bus.embedded_server import EmbeddedServer
from shared.config.schema import DeliveryConfig, NatsConfig
from shared.errors import InvalidRequest, NotFound
from shared.protocol import subjects
from shared.protocol.batch_log import BatchBegun, BatchEnded, Checkpoint, Claimed, Validated
from shared.protocol.exceeded_shares import ExceededShare
from shared.state import batch_log
from shared.tenants.storage_quotas import publish_exceeded
from tests import preloaded
from tests.cluster.conftest import ROOT
from tests.support.waiting import until
from workers.cli.batch_runs import ResultFiles
from workers.cli.commands import batch

CHAT = "/v1/chat/completions"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    config = f"models: {{m: {{path: {ROOT / 'ops' / 'demo_model'}}}}}\nnats: {{unchecked: true}}\n"
    (tmp_path / "pagemill.yaml").write_text(config)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def file(folder: Path) -> Path:
    """A file of four lines, unlike any other."""
    lines = [
        {"custom_id": f"{secrets.token_hex(4)}-{n}", "method": "POST", "url": CHAT}
        | {"body": {"model": "m"}}
        for n in range(4)
    ]
    (folder / "in.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / "in.jsonl"


async def newest(bus: Bus, tenant: str) -> BatchBegun:
    begun: list[BatchBegun] = await until(lambda: batch_log.list_begun(bus, tenant))
    return begun[0]


async def finish(bus: Bus, tenant: str) -> BatchBegun:
    """Run the newest batch of a tenant: the last of its four lines has an error."""
    begun = await newest(bus, tenant)
    log = await batch_log.open_batch(bus, tenant, begun.batch_id)
    assert log is not None
    await log.append(Claimed(0, 1, "b", Checkpoint()))
    await log.append(Validated(1, 1, Checkpoint(num_lines=4, began_s=1)))
    lines = [FinishedLine(n, b'{"n":%d}' % n) for n in range(1, 4)]
    lines.append(FinishedLine(4, b'{"n":4,"error":{"code":"invalid_media"}}', "invalid_media"))
    now = checkpoint_after(log.state.checkpoint, lines, lambda line: (line, 0))
    await log.append(results_of(2, 1, lines, now))
    await log.append(BatchEnded(3, 1, "completed", now))
    return begun


async def test_a_file_is_run_once_and_its_results_are_written(
    bus: Bus,
    broker: EmbeddedServer,
    folder: Path,
    file: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tenant, url = f"t{secrets.token_hex(4)}", broker.url
    finishing = asyncio.create_task(finish(bus, tenant))
    output = folder / "out.jsonl"
    command = ("batch", "run", file.name, "-o", output.name, "--tenant", tenant, "--nats", url)
    done = await asyncio.to_thread(preloaded.run, *command, cwd=folder)
    begun = await finishing
    assert (done.returncode, done.stdout) == (2, "")
    assert "completed; answers: 3, in out.jsonl" in done.stderr
    assert "1 error: 1 invalid_media; in out.errors.jsonl" in done.stderr
    assert output.read_text() == '{"n":1}\n{"n":2}\n{"n":3}\n'
    assert json.loads((folder / "out.errors.jsonl").read_text())["n"] == 4
    # The same command finds the batch, and writes its results again.
    output.unlink()
    assert (await asyncio.to_thread(preloaded.run, *command, cwd=folder)).returncode == 2
    assert output.exists()
    assert not (folder / "out.jsonl.part").exists()
    assert await batch_log.list_begun(bus, tenant) == [begun]

    capsys.readouterr()
    await batch.results(begun.batch_id, which="errors", tenant=tenant, nats=url)
    await batch.follow(begun.batch_id, tenant=tenant, nats=url)
    assert [json.loads(line)["n"] for line in capsys.readouterr().out.split()] == [4, 1, 2, 3, 4]
    for address in (begun.batch_id, f"{begun.batch_id}@{tenant}"):
        await batch.show(address, json=True, nats=url)
        shown = json.loads(capsys.readouterr().out)
        assert shown["batch"] == f"{begun.batch_id}@{tenant}"
    assert (shown["status"], shown["lines"], shown["errors"]) == ("completed", 4, 1)
    # A batch that has ended is not cancelled.
    assert await batch.cancel(begun.batch_id, tenant=tenant, nats=url) == 2
    await batch.create(file, tenant=tenant, nats=url)
    batch_id = capsys.readouterr().out.split()[-1]
    assert (await batch_log.list_begun(bus, tenant))[0].batch_id == batch_id
    await batch.list_batches(limit=2, nats=url)
    # Each batch is one line, also without a terminal.
    newest_row, row = capsys.readouterr().out.splitlines()[1:]
    assert newest_row.split()[2:] == ["validating", "0", "0", "0", f"{batch_id}@{tenant}"]
    assert row.split()[2:] == ["completed", "4", "3", "1", f"{begun.batch_id}@{tenant}"]


async def test_a_file_with_errors_is_not_uploaded(
    broker: EmbeddedServer, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "bad.jsonl").write_text("{}\n")
    with pytest.raises(InvalidRequest, match="errors in its lines: 1"):
        batch.run(folder / "bad.jsonl", output=folder / "out", nats=broker.url)
    assert "bad.jsonl:1: custom_id: the field is missing" in capsys.readouterr().err
    with pytest.raises(InvalidRequest, match="missing/out: No such file"):
        batch.run(folder / "bad.jsonl", output=Path("missing/out"), nats=broker.url)
    with pytest.raises(NotFound):
        await batch.show("batch_0", nats=broker.url)


def test_results_never_replace_a_device_or_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with pytest.raises(InvalidRequest, match="pipe: it is not a file"):
        ResultFiles(pipe, tmp_path / "errors").check()
    with pytest.raises(InvalidRequest, match="pipe: it is not a file"):
        ResultFiles(tmp_path / "out", pipe).check()


async def test_show_prints_why_a_batch_pauses(
    bus: Bus, broker: EmbeddedServer, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tenant, url = f"t{secrets.token_hex(4)}", broker.url
    await batch.create(file, tenant=tenant, nats=url)
    batch_id = capsys.readouterr().out.strip()
    await publish_exceeded(bus, [ExceededShare(subjects.BATCHES_STREAM, tenant, 2, 1)])
    # A batch whose file is checked has no results yet.
    for is_paused in (False, True):
        await batch.show(batch_id, tenant=tenant, nats=url)
        shown = capsys.readouterr().out
        assert ("paused   storage_quota_exceeded: this tenant has 2 bytes" in shown) is is_paused
        log = await batch_log.open_batch(bus, tenant, batch_id)
        assert log is not None
        now = Checkpoint(num_lines=4, began_s=1)
        await log.append(Validated(log.next_index, 1, now))
    await publish_exceeded(bus, [])
    await batch.show(batch_id, json=True, tenant=tenant, nats=url)
    assert json.loads(capsys.readouterr().out)["paused"] is None


async def test_ctrl_c_leaves_the_batch_and_the_same_command_continues(
    bus: Bus, broker: EmbeddedServer, folder: Path, file: Path
) -> None:
    tenant = f"t{secrets.token_hex(4)}"
    command = ["batch", "run", file.name, "-o", "out.jsonl", "--tenant", tenant]
    command += ["--nats", broker.url]
    with (folder / "err").open("wb") as err:
        running = preloaded.start(command, cwd=folder, stderr=err)
        begun = await newest(bus, tenant)
        await until(lambda: begun.batch_id in (folder / "err").read_text())
        await until((folder / "out.jsonl.part").exists)
        running.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(running.wait, 60) == 130
    assert f"pagemill batch cancel {begun.batch_id}" in (folder / "err").read_text()
    assert sorted(os.listdir(folder)) == ["err", "in.jsonl", "pagemill.yaml"]
    await finish(bus, tenant)
    assert (await asyncio.to_thread(preloaded.run, *command, cwd=folder)).returncode == 2
    assert len((folder / "out.jsonl").read_text().splitlines()) == 3
    assert await batch_log.list_begun(bus, tenant) == [begun]


async def test_follow_continues_after_the_broker_was_away(folder: Path, file: Path) -> None:
    broker = EmbeddedServer(folder / "nats")
    broker.start()
    bus = await Bus.connect(broker.url, "test")
    await bus.streams.prepare(NatsConfig(unchecked=True), DeliveryConfig())
    await batch.create(file, nats=broker.url)
    begun = await newest(bus, "")
    log = await batch_log.open_batch(bus, "", begun.batch_id)
    assert log is not None
    await log.append(Claimed(0, 1, "b", Checkpoint()))
    await log.append(Validated(1, 1, Checkpoint(num_lines=4, began_s=1)))
    lines = [FinishedLine(n, b'{"n":%d}' % n) for n in range(1, 5)]
    now = checkpoint_after(log.state.checkpoint, lines[:2], lambda line: (line, 0))
    await log.append(results_of(2, 1, lines[:2], now))
    command = ["batch", "follow", begun.batch_id, "--nats", broker.url]
    out = folder / "out"
    with out.open("wb") as stdout, (folder / "err").open("wb") as err:
        following = preloaded.start(command, cwd=folder, stderr=err, stdout=stdout)
        await until(lambda: out.read_text().count("\n") == 2)
        broker.stop()
        await until(lambda: "waiting for the broker" in (folder / "err").read_text())
        broker.start()
        now = checkpoint_after(now, lines[2:], lambda line: (line, 0))
        await log.append(results_of(3, 1, lines[2:], now))
        await log.append(BatchEnded(4, 1, "completed", now))
        assert await asyncio.to_thread(following.wait, 60) == 0
    assert out.read_text() == '{"n":1}\n{"n":2}\n{"n":3}\n{"n":4}\n'
    await bus.close()
    broker.stop()
