"""A small Pagemill system on which the cells of the fault matrix run, one after the other.

Its start takes most of the time of a cell, so it is reused for the next cell as long as it comes to
rest after each. Every process connects to the broker through a proxy of its own.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import shutil
import signal
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from ops.chaos.broker_contents import Store, arena_sockets, shm_entries
from ops.chaos.checks.checker import Verdict, check
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.expected_answers import expect
from ops.chaos.history import (
    AnyEvent,
    Fault,
    FinalState,
    Journal,
    Ready,
    WorkerEvent,
    now,
    read_events,
)
from ops.chaos.matrix.servers import SingleServer, ThreeServers
from ops.chaos.plan import MODEL, Settings, make_requests
from ops.chaos.processes.gateways import Gateways, key_by_plan_id, plan_ids
from ops.chaos.processes.pool import LOAD, Pool, Slot, worker_command
from ops.chaos.processes.proxy import Proxy
from ops.chaos.run_config import bounds_of, fake_roles, write_config
from ops.chaos.scenario import temp_files, temp_folder, wait_for_embeddings, wait_for_releases
from ops.chaos.worker.payload_events import LASTING
from shared import client
from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.records import Failure, LogRecord
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from workers import settings as product_settings

# A cell hangs if it takes this much longer than its load.
SPARE_S = 90.0
NUM_WARM_UPS = 16
CANCEL_S = 5.0
PROBE_PATIENCE_S = 2.0


@dataclass(slots=True)
class Outcome:
    """Result of a cell: its own findings, and the verdict of the checker."""

    violations: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)
    verdict: Verdict | None = None


class Deployment:
    """Owns all processes; cells inject the faults."""

    def __init__(
        self,
        settings: Settings,
        *,
        servers: Callable[[Path], SingleServer | ThreeServers] = SingleServer,
        delivery: dict[str, int] | None = None,
    ) -> None:
        """`delivery` changes this section of the configuration."""
        self.settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="pagemill-matrix-"))
        self.servers = servers(self.folder)
        self.url = self.servers.url
        self.config_file = write_config(settings, self.folder)
        config = msgspec.json.decode(self.config_file.read_bytes())
        config["delivery"] |= delivery or {}
        self.config_file.write_bytes(msgspec.json.encode(config))
        self.proxies: dict[Slot, Proxy] = {}
        self.journal = Journal(self.folder / "pool.jsonl")
        counts = {
            "coordinator": settings.coordinators,
            "renderer": settings.renderers,
            "encoder": settings.encoders,
            "engine": settings.engines,
            "gateway": settings.gateways,
            LOAD: 1,
        }
        self.gateways = Gateways(settings.gateways)
        env = {
            "CHAOS_DIR": str(self.folder / "workers"),
            "CHAOS_SEED": str(settings.seed),
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(temp_folder(self.folder)),
        }
        commands = {role: [""] for role in counts}
        self.pool = Pool(self.folder, self.servers, commands, counts, env, self.journal)
        self.rng = random.Random()
        self.outcome = Outcome()
        self._cell_folder = self.folder
        self._open = False

    # -- start and end ----------------------------------------------------------------------

    async def open(self) -> None:
        """Start all processes; without effect if they are running."""
        if self._open:
            return
        self._open = True
        for slot in self.pool.slots:
            if isinstance(self.servers, SingleServer):
                self.proxies[slot] = proxy = Proxy(int(self.url.rpartition(":")[2]))
                await proxy.start()
            self.set_command(slot)
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.stop()
        for proxy in self.proxies.values():
            await proxy.stop()

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def set_command(self, slot: Slot, *before: str) -> None:
        """Set the command of the next process in `slot`, after a prefix such as `env X=1`."""
        url = self.proxies[slot].url if slot in self.proxies else self.url
        if slot.role == LOAD:
            command = [
                sys.executable, "-m", "ops.chaos.clients.load", "--nats", url,
                "--settings", str(self._cell_folder / "settings.json"),
                "--out", str(self.clients_file),
                *self.gateways.arguments,
            ]  # fmt: skip
        else:
            fake = fake_roles(self.settings)[slot.role]
            command = worker_command(slot.role, self.config_file, url, fake, self.settings.step_ms)
        if slot.role == "gateway":
            command = self.gateways.with_port(slot, command)
        slot.command = [*before, *command]

    @property
    def clients_file(self) -> Path:
        return self._cell_folder / "clients.jsonl"

    async def _warm_up(self) -> None:
        """Send the first requests, after which the resources of processes are constant."""
        async with self.bus("warm-up") as bus:
            began = f"{now():.3f}".replace(".", "-")
            answers = (
                self.ask(bus, f"warm-{began}-{number}", SamplingParams(max_tokens=4, seed=number))
                for number in range(NUM_WARM_UPS)
            )
            await asyncio.gather(*answers)
        await self.gateways.warm_up()

    # -- one cell ---------------------------------------------------------------------------

    async def run(self, settings: Settings, disturb: "Disturb") -> Outcome:
        """Run load and disturbance, wait for rest, and check. Raises TimeoutError if it hangs."""
        self.outcome = outcome = Outcome()
        self.rng = random.Random(f"cell:{settings.seed}")
        self._cell_folder = self.folder / f"cell-{settings.seed}"
        self._cell_folder.mkdir()
        (self._cell_folder / "settings.json").write_bytes(msgspec.json.encode(settings))
        self.set_command(self.slot(LOAD))
        shm_before = shm_entries()
        store = await Store.connect(self.url)
        try:
            await self._warm_up()
            if not await store.settle():
                raise TimeoutError("not at rest before the cell")
            before, began = await self.pool.take_snapshots(), now()
            consumers_before = await store.consumers()
            await self._under(settings, disturb)
            await self.pool.wait_ready()
            await asyncio.to_thread(self.servers.settle)
            settled = await store.settle()
            await wait_for_embeddings(settings)
            mine = f"c{settings.seed}-"
            planned = make_requests(settings)
            by_name = key_by_plan_id(planned, (await store.logs()).requests)
            logs = {id: log for id, log in by_name.items() if id.startswith(mine)}
            noted = plan_ids(planned, await store.gateway_records())
            letters = [
                letter
                for letter in await store.letters()
                if (letter.request_id or "").startswith(mine)
            ]
            pids = {slot.pid for slot in self.pool.slots}
            beats = [beat for beat in await store.beats() if beat.pid in pids]
            await wait_for_releases()
            final = FinalState(
                settled=settled,
                logs=logs,
                letters=letters,
                messages=await store.messages(),
                queued_ids=await store.queued_ids(),
                consumers=await store.consumers(),
                consumers_before=consumers_before,
                beats=beats,
                before=before,
                after=await self.pool.take_snapshots(),
                shm_before=shm_before,
                shm_after=[name for name in shm_entries() if "faketime" not in name],
                sockets=arena_sockets(),
                gateway_records=[id for id in noted if id.startswith(mine)],
                temp_files=temp_files(self.folder),
            )
        finally:
            await store.close()
        run = await asyncio.to_thread(self._recorded, settings, final, began)
        outcome.verdict = verdict = check(run)
        outcome.violations += [str(violation) for violation in verdict.violations]
        outcome.figures |= {"longest_s": verdict.figures["max_s"]}
        return outcome

    async def _under(self, settings: Settings, disturb: "Disturb") -> None:
        disturbing = asyncio.create_task(disturb(self))
        try:
            async with asyncio.timeout(settings.requests / settings.rate + SPARE_S):
                await self.pool.run_load()
                await disturbing
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)

    def _recorded(self, settings: Settings, final: FinalState, began: float) -> RecordedRun:
        planned = make_requests(settings)
        config = product_settings.load_config(self.config_file)
        return RecordedRun(
            settings=settings,
            planned={one.id: one for one in planned},
            expected=expect(settings, config, planned),
            clients=list(read_events(self.clients_file)),
            pool=_since(self.folder / "pool.jsonl", began),
            workers=[
                event
                for file in sorted((self.folder / "workers").glob("*.jsonl"))
                for event in read_events(file)
                if event.t >= began or (isinstance(event, WorkerEvent) and event.what in LASTING)
            ],
            final=final,
            # A cancellation may be in flight at a worker that meets a fault.
            bounds=dataclasses.replace(bounds_of(settings), after_cancel_s=CANCEL_S),
        )

    # -- building blocks of cells -----------------------------------------------------------

    def note(self, violation: str) -> None:
        self.outcome.violations.append(violation)

    def slot(self, role: str, number: int = 0) -> Slot:
        return next(s for s in self.pool.slots if (s.role, s.number) == (role, number))

    def pick(self, role: str) -> Slot:
        return self.rng.choice([slot for slot in self.pool.slots if slot.role == role])

    def signal(self, slot: Slot, kind: str, number: signal.Signals) -> None:
        self.journal.write(Fault(now(), kind, slot.role, slot.number, slot.pid))
        slot.expected_exit |= number in (signal.SIGKILL, signal.SIGTERM)
        with contextlib.suppress(ProcessLookupError):
            os.kill(slot.pid, number)

    async def replaced(self, slot: Slot, pid: int) -> None:
        """Wait until another process than `pid` is in the slot, and ready."""
        while slot.pid == pid:  # noqa: ASYNC110
            await asyncio.sleep(0.02)
        await self.pool.wait_ready()

    @contextlib.contextmanager
    def outage(self, kind: str) -> Iterator[None]:
        """Mark an outage of the broker or of a connection to it; requests may be late."""
        self.journal.write(Fault(now(), kind, "broker", 0, 0))
        try:
            yield
        finally:
            self.journal.write(Ready(now(), "broker", 0, 0, 0.0))

    @contextlib.asynccontextmanager
    async def bus(self, name: str = "matrix"):  # type: ignore[no-untyped-def]
        """Connect to the broker without a proxy."""
        bus = await Bus.connect(self.url, f"chaos-{name}", 30.0)
        try:
            yield bus
        finally:
            await bus.close()

    async def ask(
        self, bus: Bus, id: str, sampling: SamplingParams, text: str = "probe", **more: float
    ) -> list[LogRecord]:
        request = GenerateRequest(MODEL, [Message("user", text)], sampling, **more)  # type: ignore[arg-type]
        return [record async for record in client.ask(bus, request, id)]

    async def probe(self, name: str, bound_s: float) -> None:
        """Check the time until the first record of a new request against a bound."""
        began = now()
        id = f"probe-{name}-{began:.3f}".replace(".", "-")
        request = GenerateRequest(MODEL, [Message("user", "probe")], SamplingParams(max_tokens=8))
        try:
            async with self.bus("probe") as bus:
                records = client.ask(bus, request, id)
                first = await anext(records)
                took_s = now() - began
                async for record in records:
                    first = record
        except PagemillError as error:
            self.note(f"I9 {name}: a new request failed with {error.code}: {error.message}")
            return
        if isinstance(first, Failure):
            self.note(f"I9 {name}: a new request ended with {first.error.code}")
        self.outcome.figures[name] = max(took_s, self.outcome.figures.get(name, 0.0))
        if took_s > bound_s:
            self.note(f"I9 {name}: {took_s:.2f} s to the first record of a new request")
        if self.gateways.urls:
            await self._probe_http(f"{name}_http", id, bound_s)

    async def _probe_http(self, name: str, id: str, bound_s: float) -> None:
        try:
            took_s = await self.gateways.probe(f"{id}-http", PROBE_PATIENCE_S)
        except TimeoutError:
            self.note(f"I9 {name}: no gateway answered a new request")
            return
        self.outcome.figures[name] = max(took_s, self.outcome.figures.get(name, 0.0))
        if took_s > bound_s:
            self.note(f"I9 {name}: {took_s:.2f} s to the first event of a new request")


Disturb = Callable[[Deployment], Coroutine[Any, Any, None]]


def _since(file: Path, began: float) -> list[AnyEvent]:
    return [event for event in read_events(file) if event.t >= began]
