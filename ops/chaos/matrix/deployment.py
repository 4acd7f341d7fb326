"""A small Pagemill system on which the cells of the fault matrix run, one after the other.

A start takes most of the time of a cell, so a deployment is reused for the next cell if it has come
to rest. Every process connects to the broker through a separate proxy.
"""

import asyncio
import contextlib
import dataclasses
import os
import random
import signal
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from ops.chaos.broker_contents import Store, shm_entries
from ops.chaos.checks.checker import check
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.history import Fault, FinalState, Ready, now
from ops.chaos.matrix.cell import Disturb
from ops.chaos.matrix.outcome import Outcome
from ops.chaos.plan import MODEL, Settings
from ops.chaos.processes.brokers import OneBroker
from ops.chaos.processes.pool import Slot
from ops.chaos.processes.proxy import Proxy
from ops.chaos.watched_deployment import WatchedDeployment
from shared import client
from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.messages import DeadLetter
from shared.protocol.records import Failure, LogRecord
from shared.protocol.requests import ContentPart, GenerateRequest, Message
from shared.protocol.sampling import SamplingParams

# A cell hangs if it takes this much longer than its load.
SPARE_S = 90.0
CANCEL_S = 5.0
PROBE_PATIENCE_S = 2.0


class Deployment(WatchedDeployment):
    """A deployment on which cells inject the faults, each under a load."""

    def __init__(
        self, settings: Settings, *, disk_mib: int = 0, delivery: Mapping[str, int] = {}
    ) -> None:
        self.proxies: dict[Slot, Proxy] = {}
        super().__init__(settings, "matrix", disk_mib=disk_mib, delivery=delivery)
        self.rng = random.Random()
        self.outcome = Outcome()
        self._load = settings
        self._is_open = False

    async def open(self) -> None:
        """Start all processes; without effect if they are running."""
        if self._is_open:
            return
        self._is_open = True
        for slot in self.pool.slots:
            if isinstance(self.brokers, OneBroker):
                self.proxies[slot] = proxy = Proxy(int(self.url.rpartition(":")[2]))
                await proxy.start()
            self.set_command(slot)
        await self.pool.start()

    async def close(self) -> None:
        await self.pool.stop()
        for proxy in self.proxies.values():
            await proxy.stop()

    def url_of(self, slot: Slot) -> str:
        return self.proxies[slot].url if slot in self.proxies else self.url

    # -- one cell ---------------------------------------------------------------------------

    async def run(self, settings: Settings, disturb: Disturb) -> Outcome:
        """Run load and fault, wait for rest, and check. Raises TimeoutError if the cell hangs."""
        self.outcome = outcome = Outcome()
        self.rng = random.Random(f"cell:{settings.seed}")
        self._load = settings
        self.set_load(settings, self.folder / f"cell-{settings.seed}")
        shm_before = shm_entries()
        store = await Store.connect(self.url)
        try:
            await self.warm_up()
            if not await self.rest(store):
                raise TimeoutError("not at rest before the cell")
            began = now()
            under_load = partial(self._under_load, settings, disturb)
            final = await self.observe(store, settings, shm_before, under_load)
        finally:
            await store.close()
        run = await asyncio.to_thread(self.record, final, began)
        verdict = check(run)
        outcome.violations += [str(violation) for violation in verdict.violations]
        outcome.figures |= {"longest_s": verdict.figures["max_s"]}
        return outcome

    async def _under_load(self, settings: Settings, disturb: Disturb) -> None:
        await self.run_load(settings, SPARE_S, disturb(self), all_faults=True)

    def is_own(self, id: str) -> bool:
        """Return whether a request is one of the current cell."""
        return id.startswith(f"c{self._load.seed}-")

    def own_letters(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        return [letter for letter in letters if self.is_own(letter.request_id or "")]

    def record(self, final: FinalState, since: float = 0.0) -> RecordedRun:
        run = super().record(final, since)
        # A cancellation may be in flight at a worker that meets a fault. No deaths of workers
        # excuse the end of a planned request.
        bounds = dataclasses.replace(run.bounds, after_cancel_s=CANCEL_S)
        return dataclasses.replace(run, bounds=bounds, processes={})

    # -- building blocks of cells -----------------------------------------------------------

    def note(self, violation: str) -> None:
        self.outcome.violations.append(violation)

    def slot(self, role: str, number: int = 0) -> Slot:
        return next(s for s in self.pool.slots if (s.role, s.number) == (role, number))

    def slots_of(self, role: str) -> list[Slot]:
        return [slot for slot in self.pool.slots if slot.role == role]

    def pick(self, role: str) -> Slot:
        return self.rng.choice(self.slots_of(role))

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
    async def bus(self, name: str = "matrix") -> AsyncIterator[Bus]:
        """Connect to the broker without a proxy."""
        bus = await Bus.connect(self.url, f"chaos-{name}", 30.0)
        try:
            yield bus
        finally:
            await bus.close()

    async def ask(
        self,
        bus: Bus,
        id: str,
        sampling: SamplingParams,
        content: str | Sequence[ContentPart] = "probe",
        **more: Any,
    ) -> list[LogRecord]:
        """Send a request with one message; return all records of the answer."""
        message = Message("user", content if isinstance(content, str) else [*content])
        request = GenerateRequest(MODEL, [message], sampling, **more)
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
        self.outcome.note_largest(name, took_s)
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
        self.outcome.note_largest(name, took_s)
        if took_s > bound_s:
            self.note(f"I9 {name}: {took_s:.2f} s to the first event of a new request")
