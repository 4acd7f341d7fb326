"""What is done to a scene in each cell of the fault matrix. Every function harms, heals, and looks.

Times and victims are drawn from the cell's seed. What only one cell looks for is noted by it; what
must hold in every cell the checker looks for afterwards.
"""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path

from ops.chaos import fake, nets
from ops.chaos.history import Did, Ended, Fault, now, read_events
from ops.chaos.pool import LOAD, Slot
from ops.chaos.proxy import Proxy, Way
from ops.chaos.scene import Disturb, Scene, Servers, ThreeServers, mount_disk, unmount
from shared import client, subjects
from shared.bus import Bus
from shared.errors import Overloaded, PagemillError
from shared.messages import Failure, Finish, GenerateRequest, LogRecord, Message
from shared.sampling import SamplingParams
from shared.tokenlog import is_final, read_log

WORKER_S = 5.0
BROKER_S = 3.0
# Leader elections took 4.3 to 7.4 s here; the matrix allows 10.
LEADER_S = 10.0
# Three missed pings of two seconds, and one second to come back.
PARTITION_S = 7.0
# A stopped worker of the runs loses its work after an ack wait of 2 s; the broker gives its
# connection up after 15 s.
STOP_S = 18.0


def new_id(name: str) -> str:
    return f"{name}-{now():.3f}".replace(".", "-")


async def lead_in(scene: Scene) -> None:
    """The fault comes when there is something in hand."""
    await asyncio.sleep(scene.rng.uniform(1.0, 2.0))


# -- processes --------------------------------------------------------------------------------


def sigkill(role: str, times: int = 3) -> Disturb:
    async def disturb(scene: Scene) -> None:
        for _ in range(times):
            await lead_in(scene)
            slot = scene.pick(role)
            if not slot.alive:
                return
            pid = slot.pid
            scene.signal(slot, "kill", signal.SIGKILL)
            await _back(scene, slot, pid, "after_kill")

    return disturb


async def _back(scene: Scene, slot: Slot, pid: int, name: str) -> None:
    """A new request is served, and then the victim's successor is there too."""
    if slot.role == LOAD:
        await asyncio.sleep(1.0)
        return
    await scene.probe(name, WORKER_S)
    await scene.replaced(slot, pid)


def sigstop(role: str, lasts_s: float = STOP_S) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        with scene.outage("stop-client") if role == LOAD else contextlib.nullcontext():
            scene.signal(slot, "stop", signal.SIGSTOP)
            pid = slot.pid
            try:
                await scene.probe("beside_stopped", WORKER_S)
                await asyncio.sleep(lasts_s)
            finally:
                scene.pool.resume(pid)
        await scene.probe("after_stop", WORKER_S)

    return disturb


def drain(role: str) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        if role == LOAD:
            pid = slot.pid
            scene.signal(slot, "term", signal.SIGTERM)
            await _back(scene, slot, pid, "")
            return
        pid, began = slot.pid, now()
        code = await scene.pool.restart(slot)
        ends = (e for e in read_events(scene.folder / "pool.jsonl") if isinstance(e, Ended))
        ended = next(end.t for end in ends if end.pid == pid and end.t > began)
        scene.outcome.figures["drain_s"] = ended - began
        if code != 0:
            scene.note(f"{role}: drained with exit code {code}")
        if ended - began > 30.0:
            scene.note(f"{role}: the drain took {ended - began:.1f} s")
        if late := _taken_after(scene, role, pid, began + 0.2):
            scene.note(f"{role}: took {late} messages more than 0.2 s after SIGTERM")

    return disturb


def _taken_after(scene: Scene, role: str, pid: int, since: float) -> int:
    events = read_events(scene.folder / "workers" / f"{role}-{pid}.jsonl")
    return sum(isinstance(e, Did) and e.what == "taken" and e.t > since for e in events)


def rolling(role: str, rounds: int = 2) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        for _ in range(rounds):
            for slot in [slot for slot in scene.pool.slots if slot.role == role]:
                if role != LOAD:
                    await scene.pool.restart(slot)
                elif slot.alive:
                    scene.signal(slot, "term", signal.SIGTERM)
                    await asyncio.sleep(1.5)

    return disturb


# A process that has no memory left may write half a line.
_WHOLE_LINES = 'f=$1; shift; [ -n "$(tail -c1 $f 2>/dev/null)" ] && sed -i "$ d" $f; exec "$@"'


def out_of_memory(role: str) -> Disturb:
    async def disturb(scene: Scene) -> None:
        if role == LOAD:
            scene.dress(scene.slot(LOAD), "sh", "-c", _WHOLE_LINES, "sh", str(scene.clients_file))
        for _ in range(2):
            await lead_in(scene)
            slot = scene.pick(role)
            if not slot.alive:
                return
            pid = slot.pid
            scene.journal.write(Fault(now(), "oom", role, slot.number, pid))
            await asyncio.to_thread(_starve, pid)
            await _back(scene, slot, pid, "after_oom")

    return disturb


_MEMORY = Path("/sys/fs/cgroup/memory")
_GREEDY = "import sys\nx = []\nwhile True: x.append(bytearray(b'x' * 4_000_000))"


def _starve(pid: int, limit_mib: int = 48) -> None:
    """Have the kernel's OOM killer take `pid`: in a memory cgroup with somebody greedy."""
    group = _MEMORY / f"pagemill-{os.getpid()}"
    group.mkdir(exist_ok=True)
    (group / "memory.limit_in_bytes").write_text(f"{limit_mib}M")
    try:
        Path(f"/proc/{pid}/oom_score_adj").write_text("1000")
        (group / "cgroup.procs").write_text(str(pid))
        script = f'echo $$ > {group}/cgroup.procs; echo -900 > /proc/$$/oom_score_adj; exec "$@"'
        greedy = subprocess.Popen(
            ["sh", "-c", script, "sh", sys.executable, "-c", _GREEDY], stderr=subprocess.DEVNULL
        )
        with contextlib.suppress(subprocess.TimeoutExpired):
            greedy.wait(10)
        greedy.kill()
        greedy.wait()
    except (ProcessLookupError, FileNotFoundError):
        return
    finally:
        _remove_group(group)


def _remove_group(group: Path) -> None:
    for pid in (group / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            (_MEMORY / "cgroup.procs").write_text(pid)
    with contextlib.suppress(OSError):
        group.rmdir()


def why_no_memory_limit() -> str | None:
    return None if os.access(_MEMORY / "cgroup.procs", os.W_OK) else "no memory cgroup (version 1)"


def bad_network(role: str) -> Disturb:
    """30 % of the packets lost; 200 ms of delay; then three ways in which a connection ends."""

    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        proxy = scene.proxies[slot]
        client_away = scene.outage("client") if role == LOAD else contextlib.nullcontext()
        with client_away:
            with dropping([proxy.port], probability=0.3):
                await asyncio.sleep(5.0)
                scene.outcome.figures["packets_lost"] = nets.num_dropped()
            await proxy.set(Way(delay_s=0.1), Way(delay_s=0.1))
            await asyncio.sleep(2.0)
            await proxy.set()
            for harm in (
                lambda: proxy.cut_after(scene.rng.randrange(1, 400)),
                proxy.half_open,
                proxy.cut,
            ):
                harm()
                await asyncio.sleep(2.0)
        await scene.probe("after_network", PARTITION_S)

    return disturb


@contextlib.contextmanager
def dropping(ports: list[int], **how: object) -> Iterator[None]:
    nets.drop(ports, **how)  # type: ignore[arg-type]
    try:
        yield
    finally:
        nets.heal()


# -- one server -------------------------------------------------------------------------------


def _servers(scene: Scene) -> Servers:
    assert isinstance(scene.servers, Servers)
    return scene.servers


async def _broker_back(scene: Scene, old: int) -> None:
    # What is waited for happens in another process.
    while _servers(scene).pid() == old or scene.servers.victim(0) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.02)


def broker_killed(times: int, every_s: float) -> Disturb:
    async def disturb(scene: Scene) -> None:
        for turn in range(times):
            await asyncio.sleep(every_s * scene.rng.uniform(0.8, 1.2))
            pid = _servers(scene).pid()
            scene.pool.hurt("kill", "broker", signal.SIGKILL, 0)
            if turn == times - 1:
                await _broker_back(scene, pid)
                await scene.probe("after_broker", BROKER_S)

    return disturb


async def broker_terminated(scene: Scene) -> None:
    await lead_in(scene)
    pid = _servers(scene).pid()
    scene.pool.hurt("drain", "broker", signal.SIGTERM, 0)
    await _broker_back(scene, pid)
    await scene.probe("after_broker", BROKER_S)


def broker_stopped(lasts_s: float) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        pid = _servers(scene).pid()
        with scene.outage("stop"):
            os.kill(pid, signal.SIGSTOP)
            try:
                await asyncio.sleep(lasts_s)
            finally:
                scene.pool.resume(pid)
        await scene.probe("after_broker", BROKER_S)

    return disturb


async def broker_out_of_memory(scene: Scene) -> None:
    await lead_in(scene)
    pid = _servers(scene).pid()
    scene.journal.write(Fault(now(), "kill", "broker", 0, pid))
    await asyncio.to_thread(_starve, pid)
    await _broker_back(scene, pid)
    await scene.probe("after_broker", BROKER_S)


async def broker_lossy(scene: Scene) -> None:
    await lead_in(scene)
    with scene.outage("loss"), dropping([_port(scene.url)], probability=0.3):
        await asyncio.sleep(6.0)
        scene.outcome.figures["packets_lost"] = nets.num_dropped()
    await scene.probe("after_loss", PARTITION_S)


def _port(url: str) -> int:
    return int(url.rpartition(":")[2])


def fill(folder: Path) -> Path:
    """Take all space that is left."""
    ballast = folder / "ballast"
    with ballast.open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(65_536))
    return ballast


async def disk_full(scene: Scene) -> None:
    """Full for six seconds; then there is space again, and the server is restarted."""
    await lead_in(scene)
    pid = _servers(scene).pid()
    with scene.outage("enospc"):
        ballast = await asyncio.to_thread(fill, _servers(scene).disk)
        refused = await _refusal(scene)
        await asyncio.sleep(6.0)
        await asyncio.to_thread(ballast.unlink)
        scene.pool.hurt("kill", "broker", signal.SIGKILL, 0)
        await _broker_back(scene, pid)
    if refused is not None:
        scene.outcome.figures["refused_after_s"] = refused
    await scene.probe("after_space", BROKER_S)


async def _refusal(scene: Scene) -> float | None:
    """Seconds until a new request is refused; None when the broker took it all the same."""
    began = now()
    request = GenerateRequest("demo", [Message("user", "x" * 200_000)])
    async with scene.bus("refusal") as bus:
        try:
            async with asyncio.timeout(20):
                await bus.publish(subjects.request("demo"), _json(request), f"full-{began:.0f}")
        except PagemillError as error:
            scene.outcome.figures[f"refused_as_{error.code}"] = 1
            return now() - began
        except TimeoutError:
            scene.note("a publish to a full disk got no answer within 20 s")
    return None


def _json(request: GenerateRequest) -> bytes:
    from shared.messages import to_json

    return to_json(request)


async def queue_at_its_limit(scene: Scene) -> None:
    """REQUESTS at its limit of bytes: refused at once, in words; taken again when there is room."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    for slot in engines:
        scene.signal(slot, "stop", signal.SIGSTOP)
    sizes = []
    try:
        async with scene.bus("limit") as bus:
            for number in range(40):
                request = GenerateRequest(
                    "demo", [Message("user", "x" * 200_000)], SamplingParams(max_tokens=1)
                )
                began = now()
                try:
                    await bus.publish(
                        subjects.request("demo"), _json(request), new_id(f"big-{number}")
                    )
                except Overloaded:
                    sizes.append(now() - began)
    finally:
        for slot in engines:
            scene.pool.resume(slot.pid)
    if not sizes:
        scene.note("I14: 8 MB of requests were taken into a queue of 2 MiB")
    else:
        scene.outcome.figures["refused_after_s"] = max(sizes)
        if max(sizes) > 1.0:
            scene.note(f"I14: refused after {max(sizes):.2f} s")
    await _until_empty(scene, 30.0)
    await scene.probe("after_limit", WORKER_S)


async def _until_empty(scene: Scene, timeout_s: float) -> float:
    """Until nothing that cells ask for by themselves is left; seconds."""
    from ops.chaos.dump import Store

    store = await Store.connect(scene.url)
    began = now()
    try:
        while True:
            messages = await store.messages()
            if not messages[subjects.REQUESTS_STREAM] + messages[subjects.STAGES_STREAM]:
                break
            if now() - began > timeout_s:
                scene.note(f"I5: queues are not empty after {timeout_s:.0f} s")
                break
            await asyncio.sleep(0.2)
    finally:
        await store.close()
    return now() - began


# -- three servers ----------------------------------------------------------------------------


def _cluster(scene: Scene) -> ThreeServers:
    assert isinstance(scene.servers, ThreeServers)
    return scene.servers


async def _leader(scene: Scene, stream: str = subjects.REQUESTS_STREAM) -> int:
    cluster = _cluster(scene).cluster
    while (number := await cluster.leader_of(stream)) is None:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return number


async def _follower(scene: Scene) -> int:
    leader = await _leader(scene)
    return (leader + scene.rng.choice([1, 2])) % 3


def member_killed(*, leader: bool, times: int = 2) -> Disturb:
    async def disturb(scene: Scene) -> None:
        cluster = _cluster(scene).cluster
        for _ in range(times):
            await lead_in(scene)
            number = await (_leader(scene) if leader else _follower(scene))
            with scene.outage("kill-member"):
                cluster.kill(number)
                await scene.probe("after_leader" if leader else "after_follower", LEADER_S)
            await cluster.wait_current()

    return disturb


def members_down(count: int, lasts_s: float = 6.0) -> Disturb:
    """Without a majority nothing is taken, and whoever asks is told; with one all goes on."""

    async def disturb(scene: Scene) -> None:
        servers = _cluster(scene)
        await lead_in(scene)
        first = await _leader(scene)
        numbers = [(first + turn) % 3 for turn in range(count)]
        with scene.outage("no-majority"):
            servers.held = True
            for number in numbers:
                servers.cluster.kill(number)
            await asyncio.sleep(lasts_s)
            servers.held = False
            took_s = await servers.cluster.wait_current()
            scene.outcome.figures["current_after_s"] = took_s
        await scene.probe("after_majority", LEADER_S)

    return disturb


async def leader_stopped(scene: Scene) -> None:
    cluster = _cluster(scene).cluster
    await lead_in(scene)
    number = await _leader(scene)
    with scene.outage("stop"):
        cluster.pause(number)
        try:
            await scene.probe("beside_stopped", LEADER_S)
            await asyncio.sleep(15.0)
        finally:
            cluster.resume(number)
        await cluster.wait_current()
    await scene.probe("after_stop", LEADER_S)


def member_isolated(*, leader: bool) -> Disturb:
    """Cut off from the other members; workers and clients still reach it."""

    async def disturb(scene: Scene) -> None:
        cluster = _cluster(scene).cluster
        await lead_in(scene)
        number = await (_leader(scene) if leader else _follower(scene))
        with scene.outage("isolated"):
            with dropping(cluster.route_ports, group=cluster.group(number)):
                # Who is connected to the isolated one is as isolated, until it finds another.
                await asyncio.sleep(12.0)
            await cluster.wait_current()
        await scene.probe("after_isolation", LEADER_S)

    return disturb


async def clients_cut_from_the_leader(scene: Scene) -> None:
    cluster = _cluster(scene).cluster
    await lead_in(scene)
    number = await _leader(scene)
    with scene.outage("cut-from-leader"), dropping([cluster.members[number].port]):
        await asyncio.sleep(PARTITION_S)
        await scene.probe("beside_cut", LEADER_S)
        await asyncio.sleep(4.0)
    await scene.probe("after_cut", LEADER_S)


async def rolling_members(scene: Scene) -> None:
    servers = _cluster(scene)
    await lead_in(scene)
    servers.held = True
    try:
        for number in range(3):
            with scene.outage("rolling"):
                await servers.cluster.terminate(number)
                await servers.cluster.restart(number)
                await servers.cluster.wait_current()
    finally:
        servers.held = False
    await scene.probe("after_rolling", LEADER_S)


async def leader_disk_full(scene: Scene) -> None:
    """The scene gives every member a small disk of its own."""
    servers = _cluster(scene)
    await lead_in(scene)
    number = await _leader(scene)
    member = servers.cluster.members[number]
    with scene.outage("enospc"):
        ballast = await asyncio.to_thread(fill, member.store_dir)
        await asyncio.sleep(10.0)
        scene.outcome.figures["leader_moved"] = float(await _leader(scene) != number)
        ballast.unlink()
        pid = servers.cluster.pid(number)
        servers.cluster.kill(number)
        while servers.cluster.pid(number) == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await servers.cluster.wait_current()
    await scene.probe("after_space", LEADER_S)


async def follower_corrupted(scene: Scene) -> None:
    """One byte of one follower's store is flipped while it is down; then the others fail over."""
    servers = _cluster(scene)
    cluster = servers.cluster
    await lead_in(scene)
    leader, number = await _leader(scene, subjects.TOKENS_STREAM), await _follower(scene)
    if number == leader:
        number = (number + 1) % 3
    with scene.outage("corrupt"):
        servers.held = True
        cluster.kill(number)
        flipped = await asyncio.to_thread(_flip_a_byte, cluster.members[number].store_dir, scene)
        servers.held = False
        scene.outcome.figures["bytes_flipped"] = flipped
        await cluster.wait_current()
        cluster.kill(leader)
        await cluster.wait_current()
    await scene.probe("after_corruption", LEADER_S)


def _flip_a_byte(store: Path, scene: Scene) -> int:
    blocks = [file for file in store.rglob("TOKENS/msgs/*.blk") if file.stat().st_size > 100]
    for file in blocks:
        at = scene.rng.randrange(file.stat().st_size)
        with file.open("r+b") as block:
            block.seek(at)
            byte = block.read(1)[0]
            block.seek(at)
            block.write(bytes([byte ^ 0x10]))
    return len(blocks)


# -- disks of workers -------------------------------------------------------------------------


async def redressed(scene: Scene, slots: list[Slot]) -> None:
    """Have other processes in `slots`, under the commands that they have now."""
    for slot in slots:
        pid = slot.pid
        scene.signal(slot, "replace", signal.SIGKILL)
        await scene.replaced(slot, pid)


@contextlib.asynccontextmanager
async def dressed(scene: Scene, before: list[str], program: str = "") -> AsyncIterator[None]:
    """Worker 0 of each role runs under another command; undone at the end."""
    slots = [slot for slot in scene.pool.slots if slot.role != LOAD and slot.number == 0]
    for slot in slots:
        scene.dress(slot, *before, program=program)
    await redressed(scene, slots)
    try:
        yield
    finally:
        for slot in slots:
            scene.dress(slot)
        await redressed(scene, slots)


async def log_disk_full(scene: Scene) -> None:
    """Workers that log every step to a disk without space."""
    disk = scene.folder / "small"
    mount_disk(disk, 1)
    try:
        fill(disk)
        script = f'exec "$@" 2>>{disk}/log'
        command = ["env", "PAGEMILL_LOG_LEVEL=debug", "sh", "-c", script, "sh"]
        async with dressed(scene, command):
            await scene.probe("without_logs", WORKER_S)
            await asyncio.sleep(4.0)
    finally:
        unmount(disk)


async def read_only_root(scene: Scene) -> None:
    """Workers whose file system cannot be written to; only our own journal can."""
    folder = scene.folder
    script = (
        f"mount --bind {folder} {folder} && mount --bind / / && mount -o remount,bind,ro /"
        ' && exec "$@"'
    )
    command = ["unshare", "--mount", "sh", "-c", script, "sh"]
    async with dressed(scene, command):
        await scene.probe("read_only", WORKER_S)
        await asyncio.sleep(4.0)


# -- slow readers -----------------------------------------------------------------------------


async def reader_that_stops(scene: Scene) -> None:
    """A reader of all token logs stops reading for 8 s; nobody else is to notice."""
    await lead_in(scene)
    proxy = Proxy(_port(scene.url))
    await proxy.start()
    slow = await Bus.connect(proxy.url, "slow-reader")
    try:
        await slow.listen("pm.tokens.*")
        id = new_id("slow")
        reading = asyncio.create_task(
            scene.ask(slow, id, SamplingParams(max_tokens=300, ignore_eos=True))
        )
        await asyncio.sleep(0.5)
        await proxy.blackhole(up=False)
        await asyncio.sleep(8.0)
        await proxy.heal()
        async with asyncio.timeout(20):
            records = await reading
        indexes = [record.index for record in records]
        if indexes != list(range(len(records))) or not isinstance(records[-1], Finish):
            scene.note("I2: a reader that had stopped did not get its stream whole")
    finally:
        await slow.close()
        await proxy.stop()


async def engine_slower_than_renderer(scene: Scene) -> None:
    """Long prompts into engines that stand still, and then all of them at once."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    async with scene.bus("slow") as bus:
        for slot in engines:
            scene.signal(slot, "stop", signal.SIGSTOP)
        began = now()
        sampling = SamplingParams(max_tokens=2)
        asked = [
            asyncio.create_task(scene.ask(bus, f"wait-{began:.0f}-{n}", sampling, "x" * 1900))
            for n in range(40)
        ]
        await asyncio.sleep(4.0)
        for slot in engines:
            scene.pool.resume(slot.pid)
        answers = await asyncio.gather(*asked, return_exceptions=True)
    _count_answers(scene, "waited", answers)


def _count_answers(scene: Scene, name: str, answers: list[list[LogRecord] | BaseException]) -> None:
    """Finished or refused in words; anything else is a violation."""
    finished = refused = 0
    for answer in answers:
        if isinstance(answer, Overloaded):
            refused += 1
        elif isinstance(answer, BaseException):
            scene.note(f"I10 {name}: {type(answer).__name__}: {answer}")
        elif isinstance(answer[-1], Failure):
            scene.note(f"I10 {name}: ended with {answer[-1].error.code}")
        else:
            finished += 1
    scene.outcome.figures |= {f"{name}_finished": finished, f"{name}_refused": refused}


async def batch_flood(scene: Scene) -> None:
    """Ten times the load in the batch lane, beside it."""
    await lead_in(scene)
    async with scene.bus("flood") as bus:
        began = now()
        asked = []
        for number in range(300):
            request = GenerateRequest(
                "demo",
                [Message("user", "flood")],
                SamplingParams(max_tokens=30, seed=number, temperature=1.0),
                lane="batch",
            )
            id = f"flood-{began:.0f}-{number}"
            asked.append(asyncio.create_task(_all(client.ask(bus, request, id))))
            await asyncio.sleep(0.01)
        await scene.probe("beside_flood", WORKER_S)
        _count_answers(scene, "flood", await asyncio.gather(*asked, return_exceptions=True))


async def _all(records: AsyncIterator[LogRecord]) -> list[LogRecord]:
    return [record async for record in records]


# -- clocks -----------------------------------------------------------------------------------

_FAKETIME = "/usr/lib/x86_64-linux-gnu/faketime/libfaketimeMT.so.1"


def why_no_faketime() -> str | None:
    return None if Path(_FAKETIME).exists() else "libfaketime is not installed (apt: faketime)"


# libfaketime spoils time.sleep: it asks for an absolute time of a clock that it does not fake.
_SLEEPING_OTHERWISE = """
import select, sys, types
from ops.chaos import fake, worker
fake.time = types.SimpleNamespace(sleep=lambda s: select.select([], [], [], s))
sys.exit(worker.app(sys.argv[1:], result_action="return_value"))
"""


def clock(fake_time: str) -> Disturb:
    """Worker 0 of each role lives in another time; its monotonic clock is left alone."""

    async def disturb(scene: Scene) -> None:
        command = [
            *("env", f"LD_PRELOAD={_FAKETIME}", f"FAKETIME={fake_time}"),
            *("FAKETIME_DONT_FAKE_MONOTONIC=1", "DONT_FAKE_MONOTONIC=1"),
        ]
        async with dressed(scene, command, _SLEEPING_OTHERWISE):
            await scene.probe("wrong_clock", WORKER_S)
            async with scene.bus("clock") as bus:
                for number in range(6):
                    await _deadline_is_kept(scene, bus, number)

    return disturb


async def _deadline_is_kept(scene: Scene, bus: Bus, number: int) -> None:
    """An answer that is too long for its time ends at its deadline: not before, not much later."""
    began = now()
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    records = await scene.ask(bus, new_id(f"late-{number}"), sampling, timeout_s=1.0)
    end, took_s = records[-1], now() - began
    code = end.error.code if isinstance(end, Failure) else "finish"
    if code != "deadline_exceeded" or not 0.85 < took_s < 3.0:
        scene.note(f"I1: a deadline of 1 s ended with {code} after {took_s:.2f} s")
    scene.outcome.figures["deadline_s"] = max(took_s, scene.outcome.figures.get("deadline_s", 0))


async def no_wall_clock(scene: Scene) -> None:
    """A gate: nothing in the product reads the wall clock but the one place that measures it."""
    root = Path(__file__).parent.parent.parent
    for folder in ("shared", "workers"):
        for file in sorted((root / folder).rglob("*.py")):
            for number, line in enumerate(file.read_text().splitlines(), 1):
                if "time.time(" in line or "datetime.now(" in line or "utcnow(" in line:
                    scene.note(f"{file.relative_to(root)}:{number} reads the wall clock")


# -- partitions -------------------------------------------------------------------------------


def blackholed(role: str, *, up: bool = True, down: bool = True, lasts_s: float = 10.0) -> Disturb:
    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        slot = scene.pick(role)
        proxy = scene.proxies[slot]
        with scene.outage("client") if role == LOAD else contextlib.nullcontext():
            await proxy.blackhole(up=up, down=down)
            await scene.probe("beside_partition", WORKER_S)
            await asyncio.sleep(lasts_s)
            await proxy.heal()
        await scene.probe("after_partition", PARTITION_S)

    return disturb


async def one_way(scene: Scene) -> None:
    """First nothing comes from an engine, later nothing comes to it."""
    await blackholed("engine", down=False, lasts_s=7.0)(scene)
    await blackholed("engine", up=False, lasts_s=7.0)(scene)


async def all_workers_blackholed(scene: Scene) -> None:
    """Of each role one, at the same time."""
    await lead_in(scene)
    slots = [slot for slot in scene.pool.slots if slot.role != LOAD and slot.number == 0]
    for slot in slots:
        await scene.proxies[slot].blackhole()
    await scene.probe("beside_partition", WORKER_S)
    await asyncio.sleep(10.0)
    for slot in slots:
        await scene.proxies[slot].heal()
    await scene.probe("after_partition", PARTITION_S)


async def flapping(scene: Scene, rounds: int = 10) -> None:
    """A second there, a second not there: one engine and the clients."""
    await lead_in(scene)
    proxies = [scene.proxies[scene.pick("engine")], scene.proxies[scene.slot(LOAD)]]
    with scene.outage("flap"):
        for _ in range(rounds):
            for proxy in proxies:
                await proxy.blackhole()
            await asyncio.sleep(1.0)
            for proxy in proxies:
                await proxy.heal()
            await asyncio.sleep(1.0)
    await scene.probe("after_flapping", PARTITION_S)


async def healed_after_the_deadline(scene: Scene) -> None:
    """Both engines fall silent with requests in hand, and come back when their time is over."""
    await lead_in(scene)
    engines = [scene.proxies[slot] for slot in scene.pool.slots if slot.role == "engine"]
    sampling = SamplingParams(max_tokens=1500, ignore_eos=True)
    async with scene.bus("late") as bus:
        ids = [new_id(f"silent-{n}") for n in range(6)]
        asked = [
            asyncio.create_task(_timed(scene.ask(bus, id, sampling, timeout_s=3.0))) for id in ids
        ]
        await asyncio.sleep(1.0)
        with scene.outage("engines-silent"):
            for proxy in engines:
                await proxy.blackhole()
            ends = await asyncio.gather(*asked)
            await asyncio.sleep(2.0)
            before = [await read_log(bus, id) for id in ids]
            for proxy in engines:
                await proxy.heal()
        await asyncio.sleep(3.0)
        for id, log in zip(ids, before, strict=True):
            if await read_log(bus, id) != log:
                scene.note(f"I4: {id} was written to after its end")
    for records, took_s in ends:
        end = records[-1]
        code = end.error.code if isinstance(end, Failure) else "finish"
        if code != "deadline_exceeded" or took_s > 5.0:
            scene.note(f"I1: a deadline of 3 s ended with {code} after {took_s:.2f} s")
    scene.outcome.figures["deadline_s"] = max(took_s for _, took_s in ends)
    await scene.probe("after_partition", PARTITION_S)


async def _timed(answer: Awaitable[list[LogRecord]]) -> tuple[list[LogRecord], float]:
    began = now()
    return await answer, now() - began


# -- poison -----------------------------------------------------------------------------------


def poison(seed: int, code: str, count: int = 2) -> Disturb:
    """Requests that harm the engine which runs them; each ends, is kept, and harms nobody else."""

    async def disturb(scene: Scene) -> None:
        await lead_in(scene)
        async with scene.bus("poison") as bus:
            asked = []
            for number in range(count):
                id = new_id(f"poison-{number}")
                sampling = SamplingParams(max_tokens=8, seed=seed, temperature=1.0)
                asked.append((id, asyncio.create_task(_timed(scene.ask(bus, id, sampling)))))
                await asyncio.sleep(0.5)
            for id, answer in asked:
                await _judge_poison(scene, id, code, answer)
        await scene.pool.wait_ready()
        await scene.probe("after_poison", WORKER_S)

    return disturb


async def _judge_poison(
    scene: Scene, id: str, code: str, answer: "asyncio.Task[tuple[list[LogRecord], float]]"
) -> None:
    try:
        async with asyncio.timeout(40):
            records, took_s = await answer
    except (TimeoutError, PagemillError) as error:
        scene.note(f"I11: {id} did not end within 40 s: {error!r}")
        return
    end = records[-1]
    found = end.error.code if isinstance(end, Failure) else "finish"
    key = "poison_s"
    scene.outcome.figures[key] = max(took_s, scene.outcome.figures.get(key, 0.0))
    if found != code:
        scene.note(f"I11: {id} ended with {found} instead of {code}")
    harmed = [
        event
        for file in (scene.folder / "workers").glob("*.jsonl")
        for event in read_events(file)
        if isinstance(event, Did) and event.what == "harm" and event.id == id
    ]
    scene.outcome.figures["harmed"] = max(len(harmed), int(scene.outcome.figures.get("harmed", 0)))
    if seed_of_kill(code) and len(harmed) > scene.settings.max_deaths:
        scene.note(f"I11: {id} killed {len(harmed)} workers")
    if not await _has_letter(scene, id):
        scene.note(f"I11: {id} left no dead letter")


def seed_of_kill(code: str) -> bool:
    return code == "poison"


async def _has_letter(scene: Scene, id: str) -> bool:
    from ops.chaos.dump import Store

    store = await Store.connect(scene.url)
    try:
        return any(letter.request_id == id for letter in await store.letters())
    finally:
        await store.close()


RAISING_TEXT = "raise in the renderer"
_RAISING_RENDERER = f"""
import sys
from ops.chaos import fake, worker
render = fake.FakeProcessor.render
def poisoned(self, messages, images):
    if any(m.content == {RAISING_TEXT!r} for m in messages):
        raise RuntimeError("a poisoned picture")
    return render(self, messages, images)
fake.FakeProcessor.render = poisoned
sys.exit(worker.app(sys.argv[1:], result_action="return_value"))
"""


async def raises_in_render(scene: Scene) -> None:
    slots = [slot for slot in scene.pool.slots if slot.role == "renderer"]
    for slot in slots:
        scene.dress(slot, program=_RAISING_RENDERER)
    await redressed(scene, slots)
    try:
        async with scene.bus("poison") as bus:
            asked = []
            for number in range(2):
                id = new_id(f"poison-{number}")
                answer = scene.ask(bus, id, SamplingParams(max_tokens=8), RAISING_TEXT)
                asked.append((id, asyncio.create_task(_timed(answer))))
            for id, answer_ in asked:
                await _judge_poison(scene, id, "worker_failure", answer_)
    finally:
        for slot in slots:
            scene.dress(slot)
        await redressed(scene, slots)


kills = poison(fake.KILLS_SEED, "poison")
raises = poison(fake.RAISES_SEED, "worker_failure")


_HANGING_ENGINE = """
import sys, time
from ops.chaos import fake, worker
def harm(self, sequence, *_):
    if sequence.seed == fake.HANGS_SEED:
        time.sleep(3600)
fake.FakeRunner._harm = harm
sys.exit(worker.app(sys.argv[1:], result_action="return_value"))
"""


async def hangs(scene: Scene) -> None:
    """A request at which the step of every engine hangs for ever; it has 15 s of time."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    for slot in engines:
        scene.dress(slot, program=_HANGING_ENGINE)
    await redressed(scene, engines)
    try:
        async with scene.bus("poison") as bus:
            sampling = SamplingParams(max_tokens=8, seed=fake.HANGS_SEED, temperature=1.0)
            answer = _timed(scene.ask(bus, new_id("hang"), sampling, timeout_s=15.0))
            records, took_s = await answer
            end = records[-1]
            code = end.error.code if isinstance(end, Failure) else "finish"
            scene.outcome.figures["poison_s"] = took_s
            if code not in ("poison", "deadline_exceeded"):
                scene.note(f"I11: ended with {code}")
            await scene.probe("after_hang", WORKER_S)
    finally:
        for slot in engines:
            scene.dress(slot)
        await redressed(scene, engines)


# -- overload ---------------------------------------------------------------------------------


async def only_load(scene: Scene) -> None:
    """The load itself is the fault."""


async def queued_then_cancelled(scene: Scene, count: int = 1000) -> None:
    """Engines stand still, 1,000 requests queue up, all are cancelled; every one of them ends."""
    engines = [slot for slot in scene.pool.slots if slot.role == "engine"]
    for slot in engines:
        scene.signal(slot, "stop", signal.SIGSTOP)
    began = now()
    ids = [f"queued-{began:.0f}-{number}" for number in range(count)]
    data = _json(GenerateRequest("demo", [Message("user", "x")], SamplingParams(max_tokens=50)))
    try:
        async with scene.bus("cancel") as bus:
            await _in_parallel(lambda id: bus.publish(subjects.request("demo"), data, id), ids)
            scene.outcome.figures["queued_s"] = now() - began
            began = now()
            await _in_parallel(lambda id: client.cancel(bus, id), ids)
            scene.outcome.figures["asked_to_cancel_s"] = now() - began
            for slot in engines:
                scene.pool.resume(slot.pid)
            await _until_empty(scene, 30.0)
            scene.outcome.figures["all_ended_s"] = now() - began
            codes = await _in_parallel(lambda id: _end_of(bus, id), ids)
    finally:
        for slot in engines:
            scene.pool.resume(slot.pid)
    for code in set(codes) - {"cancelled", "finish"}:
        scene.note(f"I1: {codes.count(code)} of {count} cancelled requests ended with {code}")
    scene.outcome.figures["cancelled"] = codes.count("cancelled")
    await scene.probe("after_cancelling", WORKER_S)


async def _end_of(bus: Bus, id: str) -> str:
    log = await read_log(bus, id)
    if not log or not is_final(log[-1]):
        return "no end"
    end = log[-1]
    return end.error.code if isinstance(end, Failure) else "finish"


async def _in_parallel(function: Callable[[str], Awaitable[object]], ids: list[str]) -> list[str]:
    limit = asyncio.Semaphore(64)

    async def one(id: str) -> object:
        async with limit:
            return await function(id)

    return [str(found) for found in await asyncio.gather(*(one(id) for id in ids))]


async def no_common_credit(scene: Scene) -> None:
    """No consumer has a bound on what all workers together hold, which one could use up alone."""
    async with scene.bus("credit") as bus:
        js = bus._js
        for stream in (subjects.REQUESTS_STREAM, subjects.STAGES_STREAM):
            for info in await js.consumers_info(stream):
                if info.config.max_ack_pending != -1:
                    scene.note(f"{stream}/{info.name} lets only so many be in hand")
