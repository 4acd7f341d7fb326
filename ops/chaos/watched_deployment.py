"""The deployment of a run: its folder, configuration, brokers and watched processes."""

import asyncio
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from ops.chaos.batch_files import BatchFolder
from ops.chaos.batch_plan import is_of_batches, make_batches
from ops.chaos.broker_contents import Store, arena_sockets, shm_entries
from ops.chaos.checks.recorded_run import RecordedRun
from ops.chaos.expected_answers import expect, shortened
from ops.chaos.expected_images import expect_images
from ops.chaos.expected_speech import expect_speeches
from ops.chaos.history import FinalState, Journal, WorkerEvent, read_events
from ops.chaos.plan import AUDIO, MODEL, PAINTED, PAINTER, TALKER, VOCODER, Settings, make_requests
from ops.chaos.processes.brokers import Brokers, OneBroker, ThreeBrokers
from ops.chaos.processes.gateways import Gateways
from ops.chaos.processes.pool import ACTUATOR, LOAD, Pool, Slot, worker_command
from ops.chaos.run_config import EMBEDDINGS_TTL_S, bounds_of, is_fake, keys_folder, write_run_config
from ops.chaos.worker.payload_events import LASTING
from shared import client
from shared.blobs.store import RELEASE_PAUSES_S
from shared.blobs.transports import REPLY_TIMEOUT_S
from shared.bus.bus import Bus
from shared.errors import PagemillError
from shared.protocol.messages import DeadLetter
from shared.protocol.requests import GenerateRequest, Message
from shared.protocol.sampling import SamplingParams
from shared.stage.graphs import PARTS
from shared.stage.runtime import HEARTBEAT_S
from workers import settings as product_settings
from workers.gateway.openai.speech import SPEECH
from workers.keyring import Keyring
from workers.supervisor.preloader import Preloader

# Gateways make the ids of speeches.
UNNAMED = f"{SPEECH.id_prefix}-"
WARM = "warm-"
NUM_WARM_UPS = 24
WARM_UP_TIMEOUT_S = 10.0


class WatchedDeployment:
    """Owns all processes of a run, and observes them under a load."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        *,
        disk_mib: int = 0,
        delivery: Mapping[str, int] = {},
        preloaders: Mapping[str, Preloader] = {},
    ) -> None:
        """`name` is in the name of the folder, and `delivery` changes this section of the
        configuration. With `disk_mib` each broker has a small disk."""
        self.settings = settings
        self.folder = Path(tempfile.mkdtemp(prefix=f"pagemill-{name}-"))
        self.load_folder = self.folder
        """Folder of the settings of the load, and of the journal of its clients."""
        self.config_file = write_run_config(settings, self.folder, delivery)
        self.brokers = self._make_brokers(disk_mib)
        self.url = self.brokers.url
        self.gateways = Gateways(settings.gateways, next(iter(settings.tenants), ""))
        self.journal = Journal(self.folder / "pool.jsonl")
        env = {
            "CHAOS_DIR": str(self.folder / "workers"),
            "CHAOS_SEED": str(settings.seed),
            "CHAOS_CRASH": settings.crash,
            "CHAOS_BUG": settings.bug,
            "OMP_NUM_THREADS": "1",
            "TMPDIR": str(self.temp_folder),
        }
        self.pool = Pool(
            self.folder, self.brokers, _counts(settings), env, self.journal, preloaders
        )
        for slot in self.pool.slots:
            self.set_command(slot)

    def _make_brokers(self, disk_mib: int) -> Brokers:
        store_dir, tenants = self.folder / "nats", self.settings.tenants
        if self.settings.brokers == 3:
            return ThreeBrokers(store_dir, disk_mib)
        if not tenants:
            return OneBroker(store_dir, disk_mib=disk_mib)
        keyring = Keyring(keys_folder(self.folder))
        keyring.complete(tenants)
        return OneBroker(store_dir, keyring, disk_mib)

    @property
    def temp_folder(self) -> Path:
        """Folder for temporary files of the workers."""
        folder = self.folder / "tmp"
        folder.mkdir(exist_ok=True)
        return folder

    @property
    def clients_file(self) -> Path:
        return self.load_folder / "clients.jsonl"

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- commands ---------------------------------------------------------------------------

    def url_of(self, slot: Slot) -> str:
        """Return the URL at which a process connects to the broker."""
        return self.url

    def set_command(self, slot: Slot, *before: str) -> None:
        """Set the command of the next process in `slot`, after a prefix such as `env X=1`."""
        s, url = self.settings, self.url_of(slot)
        if slot.role == LOAD:
            command = [sys.executable, "-m", "ops.chaos.clients.load", "--nats", url]
            command += ["--settings", str(self.load_folder / "settings.json")]
            command += ["--out", str(self.clients_file), *self.gateways.arguments]
            command += ["--keys", str(keys_folder(self.folder))] if s.tenants else []
        elif slot.role == ACTUATOR:
            command = [sys.executable, "-m", "ops.chaos.processes.actuator", "--nats", url]
            command += ["--config", str(self.config_file), "--folder", str(self.folder)]
            command += ["--step-ms", str(s.step_ms)]
        else:
            fake = is_fake(slot.role, s)
            command = worker_command(slot.role, self.config_file, url, fake, s.step_ms)
        if slot.role == "gateway":
            command = self.gateways.with_port(slot, command)
        slot.command = [*before, *command]

    def set_load(self, settings: Settings, folder: Path) -> None:
        """Have the clients' process run the load of `settings`, and write to this folder."""
        folder.mkdir(exist_ok=True)
        self.load_folder = folder
        (folder / "settings.json").write_bytes(msgspec.json.encode(settings))
        for slot in self.pool.slots:
            if slot.role == LOAD:
                self.set_command(slot)

    # -- one load ---------------------------------------------------------------------------

    async def warm_up(self) -> None:
        """Send the first requests, after which the resources of processes are constant."""
        bus = await Bus.connect(self.url, "chaos-warm-up")
        run = f"{WARM}{self.load_folder.name}"

        async def ask(number: int) -> None:
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
                async for _ in client.ask(bus, request, f"{run}-{number}"):
                    pass

        await asyncio.gather(*(ask(number) for number in range(NUM_WARM_UPS)))
        await bus.close()
        await self.gateways.warm_up(num_batches=4 * self.settings.batchers)

    async def rest(self, store: Store) -> bool:
        """Wait until the system is at rest; return whether it is."""
        await asyncio.to_thread(self.brokers.settle)
        return await store.settle()

    async def run_load(
        self, settings: Settings, spare_s: float, faults: Awaitable[None], *, all_faults: bool
    ) -> None:
        """Run the clients to their end, and the faults at the same time.

        The faults end with the clients, unless `all_faults` have to happen. Raises TimeoutError if
        this takes `spare_s` longer than the pace of the clients.
        """
        disturbing = asyncio.ensure_future(faults)
        try:
            async with asyncio.timeout(settings.requests / settings.rate + spare_s):
                await self.pool.run_load()
                if all_faults:
                    await disturbing
        finally:
            disturbing.cancel()
            await asyncio.gather(disturbing, return_exceptions=True)

    async def observe(
        self,
        store: Store,
        settings: Settings,
        shm_before: list[str],
        under_load: Callable[[], Awaitable[None]],
    ) -> FinalState:
        """Run a load on the system at rest, and return the state at the next rest."""
        before = await self.pool.take_snapshots()
        consumers_before = await store.consumers()
        await under_load()
        await self.pool.wait_ready()
        settled = await self.rest(store)
        if settings.encoders:
            # Embeddings that no engine has fetched expire.
            await asyncio.sleep(EMBEDDINGS_TTL_S + HEARTBEAT_S)
        # Ids on the bus, and the same ids in the plan.
        names = {entry.bus_id: entry.id for entry in make_requests(settings)}
        requests, outputs, ends = await store.logs()
        logs = {names.get(id, id): log for id, log in requests.items()}
        logs = {id: log for id, log in logs.items() if self.is_own(id)}
        records = [names.get(id, id) for id in await store.gateway_records()]
        letters = [
            replace(letter, request_id=names.get(letter.request_id or "", letter.request_id))
            for letter in await store.letters()
        ]
        # Heartbeats of dead workers stay for some seconds. Heartbeats are read before the wait, at
        # the end of which all payloads have expired and no worker tries to release one.
        pids = {slot.pid for slot in self.pool.slots}
        beats = [beat for beat in await store.beats() if beat.pid in pids]
        await asyncio.sleep(sum(RELEASE_PAUSES_S) + REPLY_TIMEOUT_S)
        return FinalState(
            settled=settled,
            logs={id: log for id, log in logs.items() if not id.startswith(UNNAMED)},
            letters=self.own_letters(letters),
            messages=await store.messages(),
            queued_ids=await store.queued_ids(),
            consumers=await store.consumers(),
            consumers_before=consumers_before,
            beats=beats,
            before=before,
            after=await self.pool.take_least_snapshots(),
            shm_before=shm_before,
            shm_after=[name for name in shm_entries() if "faketime" not in name],
            sockets=arena_sockets(),
            gateway_records=[
                id for id in records if self.is_own(id) and not id.startswith(UNNAMED)
            ],
            # Folders do not count, because libraries keep some.
            temp_files=[path.name for path in self.temp_folder.rglob("*") if not path.is_dir()],
            unnamed={id: log for id, log in logs.items() if id.startswith(UNNAMED)},
            outputs={id: output for id, output in outputs.items() if self.is_own(id)},
            ends={id: end for id, end in ends.items() if self.is_own(id)},
        )

    def is_own(self, id: str) -> bool:
        """Return whether a request is one of the load, by its id in the plan."""
        is_warm_up = id.startswith(WARM) or id in self.gateways.warm_up_ids
        return not (is_warm_up or is_of_batches(id))

    def own_letters(self, letters: list[DeadLetter]) -> list[DeadLetter]:
        """Return the dead letters that the checks get."""
        return [letter for letter in letters if not is_of_batches(letter.request_id or "")]

    def record(self, final: FinalState, since: float = 0.0) -> RecordedRun:
        (self.load_folder / "final.msgpack").write_bytes(msgspec.msgpack.encode(final))
        return read_run(self.folder, self.load_folder, since)


def _counts(settings: Settings) -> dict[str, int]:
    """Return how many processes of each role run."""
    is_scaled = settings.scaled is not None
    return {
        "coordinator": settings.coordinators,
        "renderer": settings.renderers,
        "encoder": settings.encoders,
        "engine": 0 if is_scaled else settings.engines,
        "batcher": settings.batchers,
        TALKER: settings.talkers,
        VOCODER: settings.vocoders,
        PAINTER: settings.painters,
        **dict.fromkeys(PARTS, settings.painter_parts),
        "gateway": settings.gateways,
        "autoscaler": int(is_scaled),
        ACTUATOR: int(is_scaled),
        LOAD: 1,
    }


def read_run(folder: Path, load_folder: Path | None = None, since: float = 0.0) -> RecordedRun:
    """Read a recorded run from its folder.

    If the deployment had several loads, `load_folder` is the folder of one of them, and `since` the
    time at which it began.
    """
    load_folder = load_folder or folder
    settings = msgspec.json.decode((load_folder / "settings.json").read_bytes(), type=Settings)
    planned = make_requests(settings)
    config = product_settings.load_config(folder / "pagemill.yaml")
    final = msgspec.msgpack.decode((load_folder / "final.msgpack").read_bytes(), type=FinalState)
    written = [shortened(request, final.logs.get(request.id, [])) for request in planned]
    expected = expect(settings, config, written)
    files = BatchFolder(load_folder)
    batches = [] if settings.batches is None else make_batches(settings, settings.batches)
    processes = {}
    for file in sorted((folder / "workers").glob("*.jsonl")):
        role, _, pid = file.stem.rpartition("-")
        processes[role, int(pid)] = [
            event
            for event in read_events(file)
            if event.t >= since or (isinstance(event, WorkerEvent) and event.step in LASTING)
        ]
    return RecordedRun(
        settings=settings,
        planned={request.id: request for request in planned},
        expected=expected,
        speeches=expect_speeches(settings, config, planned, expected),
        images=expect_images(settings, config, planned),
        clients=list(read_events(load_folder / "clients.jsonl")),
        pool=[event for event in read_events(folder / "pool.jsonl") if event.t >= since],
        workers=[event for events in processes.values() for event in events],
        processes=processes,
        final=final,
        bounds=bounds_of(settings),
        batches=[files.batch(batch) for batch in batches],
        singles=files.singles(),
    )
