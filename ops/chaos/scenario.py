"""One run from its settings to a verdict: start, load, faults, rest, recording, check."""

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ops.chaos.broker_contents import Store, arena_sockets, shm_entries
from ops.chaos.checks.checker import Verdict, check
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.expected_answers import expect
from ops.chaos.expected_images import expect_images
from ops.chaos.expected_speech import expect_speeches
from ops.chaos.history import FinalState, Journal, read_events
from ops.chaos.plan import AUDIO, MODEL, PAINTED, PAINTER, TALKER, VOCODER, Settings, make_requests
from ops.chaos.processes import nemesis
from ops.chaos.processes.cluster import Cluster
from ops.chaos.processes.gateways import Gateways, key_by_plan_id, letters_by_plan_id, plan_ids
from ops.chaos.processes.pool import ACTUATOR, LOAD, Brokers, OneBroker, Pool, worker_command
from ops.chaos.processes.scaled_engines import ScaledEngines
from ops.chaos.run_config import EMBEDDINGS_TTL_S, bounds_of, fake_roles, keys_folder, write_config
from shared import client
from shared.blobs.store import RELEASE_PAUSES_S
from shared.blobs.transports import REPLY_TIMEOUT_S
from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.messages import Heartbeat
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.stage.runtime import HEARTBEAT_S
from workers import settings as product_settings
from workers.gateway.core.ids import PREFIXES
from workers.keyring import Keyring
from workers.supervisor.preloader import Preloader

# Clients do not name their speeches, so gateways make the ids.
UNNAMED = f"{PREFIXES['speech']}-"
NUM_WARM_UPS = 24
WARM_UP_S = 5.0
WARM_UP_TIMEOUT_S = 10.0
# A run hangs if it takes this much longer than its pace requires.
SPARE_S = 300.0


async def wait_for_embeddings(settings: Settings) -> None:
    """Wait until embeddings that no engine has fetched have expired."""
    if settings.encoders:
        await asyncio.sleep(EMBEDDINGS_TTL_S + HEARTBEAT_S)


async def wait_for_releases() -> None:
    """Wait until all attempts to release payloads of dead workers have been given up."""
    await asyncio.sleep(sum(RELEASE_PAUSES_S) + REPLY_TIMEOUT_S)


def temp_folder(folder: Path) -> Path:
    """Return the folder for temporary files of the workers of a run."""
    temp = folder / "tmp"
    temp.mkdir(exist_ok=True)
    return temp


def temp_files(folder: Path) -> list[str]:
    """Return the names of temporary files; folders do not count, because libraries keep some."""
    return [path.name for path in temp_folder(folder).rglob("*") if not path.is_dir()]


class ThreeBrokers:
    """A cluster as the pool's brokers; the nemesis picks its victims from the cluster itself."""

    def __init__(self, folder: Path) -> None:
        self.cluster = Cluster(folder)
        self.url = self.cluster.url

    def start(self) -> None:
        asyncio.run(self.cluster.start())

    def stop(self) -> None:
        asyncio.run(self.cluster.stop())

    def pick_victim(self, pick: int) -> int | None:
        return None

    def revive(self) -> list[int]:
        ended = [n for n, member in enumerate(self.cluster.members) if member.has_exited]
        for number in ended:
            self.cluster.start_member(number)
        return [self.cluster.pid(number) for number in ended]


class Scenario:
    """A run with a folder of its own, which is kept if a check fails."""

    def __init__(self, settings: Settings, preloaders: Mapping[str, Preloader] = {}) -> None:
        self.settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix="pagemill-chaos-"))
        self.config_file = write_config(settings, self.folder)
        (self.folder / "settings.json").write_bytes(msgspec.json.encode(settings))
        self.brokers = self._make_brokers()
        self.gateways = Gateways(settings.gateways, next(iter(settings.tenants), ""))
        self.pool = Pool(
            self.folder,
            self.brokers,
            self._commands(),
            {
                "coordinator": settings.coordinators,
                "renderer": settings.renderers,
                "encoder": settings.encoders,
                "engine": settings.engines if settings.scaled is None else 0,
                TALKER: settings.talkers,
                VOCODER: settings.vocoders,
                PAINTER: settings.painters,
                "gateway": settings.gateways,
                "autoscaler": int(settings.scaled is not None),
                ACTUATOR: int(settings.scaled is not None),
                "load": 1,
            },
            {
                "CHAOS_DIR": str(self.folder / "workers"),
                "CHAOS_SEED": str(settings.seed),
                "CHAOS_CRASH": settings.crash,
                "CHAOS_BUG": settings.bug,
                "OMP_NUM_THREADS": "1",
                "TMPDIR": str(temp_folder(self.folder)),
            },
            Journal(self.folder / "pool.jsonl"),
            preloaders,
        )
        scaled = settings.scaled
        self.engines = (
            None if scaled is None else ScaledEngines(self.folder, self.pool, settings, scaled)
        )
        for slot in self.pool.slots:
            if slot.role == "gateway":
                slot.command = self.gateways.with_port(slot, slot.command)

    def _make_brokers(self) -> Brokers:
        store_dir, tenants = self.folder / "nats", self.settings.tenants
        if self.settings.brokers == 3:
            return ThreeBrokers(store_dir)
        if not tenants:
            return OneBroker(store_dir)
        keyring = Keyring(keys_folder(self.folder))
        keyring.complete(tenants)
        return OneBroker(store_dir, keyring)

    def _commands(self) -> dict[str, list[str]]:
        s, url = self.settings, self.brokers.url
        commands = {
            role: worker_command(role, self.config_file, url, fake, s.step_ms)
            for role, fake in fake_roles(s).items()
        }
        commands["load"] = [
            sys.executable, "-m", "ops.chaos.clients.load", "--nats", url,
            "--settings", str(self.folder / "settings.json"),
            "--out", str(self.folder / "clients.jsonl"),
            *self.gateways.arguments,
            *(("--keys", str(keys_folder(self.folder))) if s.tenants else ()),
        ]  # fmt: skip
        commands[ACTUATOR] = [
            sys.executable, "-m", "ops.chaos.processes.actuator", "--nats", url,
            "--config", str(self.config_file), "--folder", str(self.folder),
            "--step-ms", str(s.step_ms),
        ]  # fmt: skip
        return commands

    async def run(self) -> RecordedRun:
        """Return the recorded run. Raises TimeoutError if the system does not start or end."""
        shm_before = shm_entries()
        try:
            await self.pool.start()
            final = await self._run(shm_before)
        finally:
            await self.pool.stop()
        (self.folder / "final.msgpack").write_bytes(msgspec.msgpack.encode(final))
        return await asyncio.to_thread(read_run, self.folder)

    async def _run(self, shm_before: list[str]) -> FinalState:
        store = await Store.connect(self.brokers.url)
        try:
            await self._warm_up()
            await store.settle()
            await self._wait_for_zero()
            before = await self.pool.take_snapshots()
            consumers_before = await store.consumers()
            await self._under_load()
            await self.pool.wait_ready()
            settled = await store.settle()
            await self._wait_for_zero()
            await wait_for_embeddings(self.settings)
            logs, outputs, ends = await store.logs()
            warm = self.gateways.warm_up_ids
            logs = {id: log for id, log in logs.items() if id[:4] != "warm" and id not in warm}
            unnamed = {id: log for id, log in logs.items() if id.startswith(UNNAMED)}
            mine = {id: log for id, log in logs.items() if id not in unnamed}
            noted = [
                id
                for id in await store.gateway_records()
                if id not in warm and not id.startswith(UNNAMED)
            ]
            planned = make_requests(self.settings)
            # Heartbeats are read before the wait, after which all payloads have expired.
            beats = self._own(await store.beats())
            await wait_for_releases()
            return FinalState(
                settled=settled,
                logs=key_by_plan_id(planned, mine),
                letters=letters_by_plan_id(planned, await store.letters()),
                messages=await store.messages(),
                queued_ids=await store.queued_ids(),
                consumers=await store.consumers(),
                consumers_before=consumers_before,
                beats=beats,
                before=before,
                after=await self.pool.take_snapshots(),
                shm_before=shm_before,
                shm_after=shm_entries(),
                sockets=arena_sockets(),
                gateway_records=plan_ids(planned, noted),
                temp_files=temp_files(self.folder),
                unnamed=unnamed,
                outputs={id: found for id, found in outputs.items() if id[:4] != "warm"},
                ends={id: found for id, found in ends.items() if id[:4] != "warm"},
            )
        finally:
            await store.close()

    def _own(self, beats: list[Heartbeat]) -> list[Heartbeat]:
        """Return the heartbeats of running workers; those of dead ones stay for some seconds."""
        pids = {slot.pid for slot in self.pool.slots}
        return [beat for beat in beats if beat.pid in pids]

    async def _wait_for_zero(self) -> None:
        """Wait until the engines of a scaled pool have ended; the checks report those that stay."""
        if self.engines is not None:
            await self.engines.wait_for_none()

    async def _warm_up(self) -> None:
        """Send the first requests, after which the resources of processes are constant."""
        bus = await Bus.connect(self.brokers.url, "chaos-warm-up")

        async def one(number: int) -> None:
            sampling = SamplingParams(max_tokens=4, seed=number)
            question = [Message("user", f"warm {number}")]
            request = GenerateRequest(MODEL, question, sampling, timeout_s=WARM_UP_TIMEOUT_S)
            if self.settings.talkers and number % 2:
                request = replace(request, outputs=["text", AUDIO])
            if self.settings.painters and number % 4 == 0:
                request = GenerateRequest(
                    MODEL, prompt="warm", outputs=[PAINTED], timeout_s=WARM_UP_TIMEOUT_S
                )
            # Crash points and planted bugs may fail warm-up requests, which are not checked.
            with contextlib.suppress(PagemillError):
                async for _ in client.ask(bus, request, f"warm-{number}"):
                    pass

        await asyncio.gather(*(one(number) for number in range(NUM_WARM_UPS)))
        await bus.close()
        await self.gateways.warm_up()

    async def _under_load(self) -> None:
        s = self.settings
        paced_s = s.requests / s.rate
        faults = asyncio.create_task(self._faults(paced_s))
        try:
            async with asyncio.timeout(paced_s + SPARE_S):
                await self.pool.run_load()
                if s.rolling_rounds:
                    await faults
        finally:
            faults.cancel()
            await asyncio.gather(faults, return_exceptions=True)

    async def _faults(self, paced_s: float) -> None:
        s = self.settings
        if self.engines is not None:
            await self.engines.disturb()
        elif s.rolling_rounds:
            await self._roll(s.rolling_rounds)
        elif isinstance(self.brokers, ThreeBrokers):
            await nemesis.kill_leaders(s.fault_every_s, self.brokers.cluster, self.pool.journal)
        elif s.fault_every_s:
            weights = s.faults or nemesis.KILLS
            schedule = nemesis.make_schedule(s.seed, s.fault_every_s, paced_s + SPARE_S, weights)
            await nemesis.carry_out(schedule, self.pool)

    async def _roll(self, rounds: int) -> None:
        """Drain and replace every worker in turn, for a number of rounds."""
        for _ in range(rounds):
            for slot in self.pool.slots:
                if slot.role != LOAD:
                    await self.pool.restart(slot)


def read_run(folder: Path) -> RecordedRun:
    """Read a recorded run from its folder."""
    settings = msgspec.json.decode((folder / "settings.json").read_bytes(), type=Settings)
    planned = make_requests(settings)
    config = product_settings.load_config(folder / "pagemill.yaml")
    expected = expect(settings, config, planned)
    processes = {}
    for file in sorted((folder / "workers").glob("*.jsonl")):
        role, _, pid = file.stem.rpartition("-")
        processes[role, int(pid)] = list(read_events(file))
    return RecordedRun(
        settings=settings,
        planned={one.id: one for one in planned},
        expected=expected,
        speeches=expect_speeches(settings, config, planned, expected),
        images=expect_images(settings, config, planned),
        clients=list(read_events(folder / "clients.jsonl")),
        pool=list(read_events(folder / "pool.jsonl")),
        workers=[event for events in processes.values() for event in events],
        processes=processes,
        final=msgspec.msgpack.decode((folder / "final.msgpack").read_bytes(), type=FinalState),
        bounds=bounds_of(settings),
    )


async def run_scenario(
    settings: Settings, keep: bool = False, preloaders: Mapping[str, Preloader] = {}
) -> tuple[Verdict, Path]:
    """Run and check; return the verdict and the folder, which is removed after a clean run.

    `preloaders` are those of `Pool`; they end with the run.
    """
    scenario = Scenario(settings, preloaders)
    try:
        verdict = check(await scenario.run())
    finally:
        for preloader in set(preloaders.values()):
            preloader.close()
    if verdict.clean and not keep:
        shutil.rmtree(scenario.folder)
    return verdict, scenario.folder
