"""`pagemill up` on which cells of the fault matrix run, with clients of tenants.

Neither clients nor checks use Pagemill's code: clients have only a key, processes are started by
the command and found in /proc, and the answers are compared with answers from before the fault.
"""

import asyncio
import contextlib
import json
import os
import random
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from msgspec import Struct

from ops.chaos.matrix.outcome import Outcome
from ops.chaos.plain_client import PAUSE_S, Answer, PlainClient, body_of, random_id
from ops.chaos.processes.brokers import mount_disk, unmount

ROOT = Path(__file__).parents[3]
TENANTS = ("a", "b")
"""The tenants of the load. Each request of one has the id of a request of the other."""
HOSTILE = "c"
QUESTIONS = {"a": "What can you do?", "b": "Who are you?", HOSTILE: "What is a queue?"}
START_S = 200.0
STOP_S = 40.0
# A load hangs if it takes this much longer than its pace.
SPARE_S = 120.0
REST_S = 60.0
HTTP_S = 30.0
# Requests that hang for this time must not delay the requests of a cell.
_threads = ThreadPoolExecutor(256, "http")
MAX_QUEUED = 40

CONFIG = """
models:
  demo:
    path: {root}/ops/demo_model
    max_model_len: 1024
    sampling_defaults: {{temperature: 0.0, max_tokens: 64}}
delivery: {{ack_wait_s: 2.0, drain_s: 10.0, max_queued: {max_queued}}}
gateway: {{port: {gateway_port}}}
nats: {{port: {broker_port}, tenant_queued: {max_queued}{min_free}}}
"""


class Load(Struct, frozen=True):
    """Load of a cell: each id is used by all tenants and over HTTP."""

    seed: int = 1
    requests: int = 20
    """Number of ids."""
    rate: float = 2.0
    """Ids per second."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of the machine on which the system runs."""

    disk_mib: int = 0
    """Size of the disk of the broker's store; 0 for the disk of temporary files."""
    max_files: int = 0
    """Hard limit on the descriptors of a process; 0 for the present one."""
    min_free_mib: int = 0
    """Free space of this disk below which new work is refused; 0 for the default."""


@dataclass(frozen=True, slots=True)
class Reply:
    """Answer of the gateway."""

    status: int
    body: Any

    @property
    def error_code(self) -> str:
        """Code of the error; empty without one."""
        with contextlib.suppress(KeyError, TypeError, ValueError):
            return str(json.loads(self.body)["error"]["code"])
        return ""


@dataclass(slots=True)
class WholeSystem:
    """A running `pagemill up`, and connected clients of its tenants."""

    limits: Limits = field(default_factory=Limits)
    settings: Load = field(default_factory=Load)
    folder: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="pagemill-up-")))
    outcome: Outcome = field(default_factory=Outcome)
    rng: random.Random = field(default_factory=random.Random)
    ids: list[str] = field(default_factory=list)
    """The ids of the load, which all tenants use."""
    clients: dict[str, PlainClient] = field(default_factory=dict)
    _expected: dict[str, str] = field(default_factory=dict)
    _process: subprocess.Popen[bytes] | None = None
    _ports: tuple[int, int] = (0, 0)

    # -- the system ---------------------------------------------------------------------------

    @property
    def broker_port(self) -> int:
        return self._ports[0]

    @property
    def store(self) -> Path:
        return self.folder / "data" / "nats"

    @property
    def broker_pid(self) -> int:
        return int((self.store / "nats-server.pid").read_text())

    @property
    def log(self) -> str:
        """Everything that the system has logged."""
        files = (self.folder / "up.log", self.folder / "up.err")
        return "".join(file.read_text() for file in files if file.exists())

    def key(self, name: str) -> Path:
        return self.store / "keys" / "tenants" / f"{name}.nk"

    async def open(self) -> None:
        """Start the system; without effect if it runs."""
        if self._process is not None:
            return
        if self.limits.disk_mib:
            mount_disk(self.store, self.limits.disk_mib)
        self._write_config()
        self._process = self.start_up("up")
        async with asyncio.timeout(START_S):
            while "ready at" not in self.log:  # noqa: ASYNC110
                await asyncio.sleep(PAUSE_S)
        for name in (*TENANTS, HOSTILE):
            await asyncio.to_thread(self._add_tenant, name)
            self.clients[name] = await self.connect(name)
        for name in TENANTS:
            answer = await self.clients[name].ask(random_id(self.rng), body_of(QUESTIONS[name]))
            self._expected[name] = answer.text

    def _write_config(self) -> None:
        self._ports = _free_port(), _free_port()
        min_free_mib = self.limits.min_free_mib
        text = CONFIG.format(
            root=ROOT,
            max_queued=MAX_QUEUED,
            broker_port=self.broker_port,
            gateway_port=self._ports[1],
            min_free=f", min_free_mib: {min_free_mib}" if min_free_mib else "",
        )
        (self.folder / "pagemill.yaml").write_text(text)

    def start_up(self, name: str, **env: str) -> subprocess.Popen[bytes]:
        """Start `pagemill up` in the folder of the system. Its logs have this name."""
        env |= {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"PAGEMILL_LOG_FILE": str(self.folder / f"{name}.log")}
        command = [sys.executable, "-m", "workers", "up"]
        with (self.folder / f"{name}.err").open("wb") as stderr:
            return subprocess.Popen(
                command,
                cwd=self.folder,
                env=os.environ | env,
                stderr=stderr,
                preexec_fn=self._limit_files,
            )

    def _limit_files(self) -> None:
        if number := self.limits.max_files:
            resource.setrlimit(resource.RLIMIT_NOFILE, (number, number))

    def _add_tenant(self, name: str) -> None:
        command = [sys.executable, "-m", "workers", "keys", "add-tenant", name]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run(command, cwd=self.folder, env=env, check=True, stdout=subprocess.DEVNULL)

    async def connect(self, name: str) -> PlainClient:
        """Connect with the key of a tenant, when the broker knows it."""
        client = await PlainClient.connect(f"nats://127.0.0.1:{self.broker_port}", self.key(name))
        async with asyncio.timeout(START_S):
            while True:
                with contextlib.suppress(Exception):
                    await client.call("pm.card.demo")
                    return client
                await asyncio.sleep(PAUSE_S)

    async def connect_operator(self) -> PlainClient:
        url, key = f"nats://127.0.0.1:{self.broker_port}", self.store / "keys" / "operator.nk"
        return await PlainClient.connect(url, key, "_INBOX.operator")

    async def close(self) -> None:
        for client in self.clients.values():
            await client.close()
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)
            try:
                await asyncio.to_thread(self._process.wait, STOP_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
        if self.limits.disk_mib:
            unmount(self.store)

    def remove(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    # -- one cell -----------------------------------------------------------------------------

    async def run(
        self, settings: Load, disturb: Callable[["WholeSystem"], Awaitable[None]]
    ) -> Outcome:
        """Run load and fault, wait for rest, and check. Raises TimeoutError if the cell hangs."""
        self.outcome = Outcome()
        self.rng = random.Random(f"cell:{settings.seed}")
        self.ids = [random_id(self.rng) for _ in range(settings.requests)]
        async with asyncio.timeout(settings.requests / settings.rate + SPARE_S):
            async with asyncio.TaskGroup() as group:
                group.create_task(self._load(settings))
                group.create_task(_awaited(disturb(self)))
        await self._rest()
        return self.outcome

    async def _load(self, settings: Load) -> None:
        async with asyncio.TaskGroup() as group:
            for request_id in self.ids:
                for name in TENANTS:
                    group.create_task(self._complete(name, request_id))
                group.create_task(self._complete_http(request_id))
                await asyncio.sleep(1 / settings.rate)

    async def _complete(self, name: str, request_id: str) -> None:
        """Ask until the answer is complete: an error that may pass is followed by another id."""
        began = time.monotonic()
        for number in range(10**6):
            own_id = f"{request_id}-{number}" if number else request_id
            answer = await self.clients[name].ask(own_id, body_of(QUESTIONS[name]))
            for fault in answer.faults():
                self.note(f"{name}: {fault}")
            if not answer.error:
                break
            self._count_error(name, answer)
            await asyncio.sleep(answer.error.get("retry_after_s") or PAUSE_S)
        if answer.text != self._expected[name]:
            self.note(f"{name}: {own_id} has the text {answer.text!r}")
        self.outcome.note_largest("longest_s", time.monotonic() - began)

    def _count_error(self, name: str, answer: Answer) -> None:
        code, is_retryable = answer.error["code"], answer.error["retryable"]
        key = f"ended_{code}"
        self.outcome.figures[key] = self.outcome.figures.get(key, 0.0) + 1
        if not is_retryable:
            self.note(f"{name}: {answer.request_id} ended with {code}")

    async def _complete_http(self, request_id: str) -> None:
        """Ask with the same id over HTTP until there is an answer."""
        while True:
            reply = await self.chat(request_id)
            if reply is not None and reply.status == 200:
                return
            if reply is not None and reply.status not in (429, 500, 502, 503, 504, 507):
                self.note(f"HTTP {request_id}: {reply.status} {reply.body}")
                return
            request_id = random_id(self.rng)
            await asyncio.sleep(1.0)

    async def _rest(self) -> None:
        """Wait until the gateway is ready and no queue has a message."""
        await self._until(self.is_ready, REST_S, "the gateway is not ready at the end")
        operator = await self.connect_operator()
        began = time.monotonic()
        while left := {s["config"]["name"]: n for s in await queues(operator) if (n := size_of(s))}:
            if time.monotonic() - began > REST_S:
                self.note(f"messages are left in queues: {left}")
                break
            await asyncio.sleep(PAUSE_S)
        await operator.close()

    # -- building blocks of cells ---------------------------------------------------------------

    def note(self, violation: str) -> None:
        self.outcome.violations.append(violation)

    async def _until(self, condition: Callable[[], Any], timeout_s: float, violation: str) -> float:
        """Wait until a condition is true, and return the seconds that this took."""
        began = time.monotonic()
        while True:
            value = condition()
            if await value if asyncio.iscoroutine(value) else value:
                return time.monotonic() - began
            if time.monotonic() - began > timeout_s:
                self.note(violation)
                return time.monotonic() - began
            await asyncio.sleep(PAUSE_S)

    async def wait_for(self, name: str, condition: Callable[[], Any], bound_s: float) -> None:
        """Check the time until a condition is true against a bound."""
        took_s = await self._until(condition, bound_s, f"{name}: not within {bound_s:g} s")
        self.outcome.note_largest(name, took_s)

    async def probe(self, name: str, bound_s: float) -> None:
        """Check the time until a new request is answered over NATS and HTTP against a bound."""
        began = time.monotonic()
        try:
            async with asyncio.timeout(bound_s):
                await self._complete(self.rng.choice(TENANTS), random_id(self.rng))
                await self._complete_http(random_id(self.rng))
        except TimeoutError:
            self.note(f"{name}: no answer to a new request within {bound_s:g} s")
        self.outcome.note_largest(name, time.monotonic() - began)

    async def chat(self, request_id: str = "", timeout_s: float = HTTP_S) -> Reply | None:
        """Ask over HTTP; None without an answer."""
        body = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
        data = json.dumps(body).encode()
        headers = {"X-Request-Id": request_id} if request_id else {}
        return await self.http("/v1/chat/completions", data, timeout_s, **headers)

    async def is_ready(self) -> bool:
        reply = await self.http("/ready")
        return reply is not None and reply.status == 200

    async def http(
        self, path: str, body: bytes | None = None, timeout_s: float = HTTP_S, **headers: str
    ) -> Reply | None:
        """Send a request to the gateway; None without an answer."""
        url = f"http://127.0.0.1:{self._ports[1]}{path}"
        headers = {"Content-Type": "application/json"} | headers
        request = urllib.request.Request(url, body, headers)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(_threads, _fetch, request, timeout_s)

    def workers(self, role: str) -> list[int]:
        """Return the processes of a role, which are named after their workers."""
        assert self._process is not None
        return [pid for pid, name in _descendants(self._process.pid) if name.startswith(f"{role}-")]

    def broker_rss_mib(self) -> float:
        status = Path(f"/proc/{self.broker_pid}/status").read_text()
        return int(status.partition("VmRSS:")[2].split()[0]) / 1024


async def _awaited(awaitable: Awaitable[None]) -> None:
    await awaitable


async def queues(operator: PlainClient) -> list[dict[str, Any]]:
    """Return the descriptions of all streams that are work queues."""
    listed = await operator.call("$JS.API.STREAM.LIST")
    return [s for s in listed.get("streams") or [] if s["config"]["retention"] == "workqueue"]


def size_of(stream: dict[str, Any]) -> int:
    return int(stream["state"]["messages"])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _fetch(request: urllib.request.Request, timeout_s: float) -> Reply | None:
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return Reply(answer.status, json.load(answer))
    except urllib.error.HTTPError as error:
        with error:
            return Reply(error.code, error.read().decode(errors="replace"))
    except (OSError, ValueError):
        return None


def _descendants(root: int) -> Iterator[tuple[int, str]]:
    """Yield the processes below one, with their names."""
    parents, names = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            name, _, rest = (folder / "stat").read_text().partition("(")[2].rpartition(")")
            pid = int(folder.name)
            parents[pid], names[pid] = int(rest.split()[1]), name
    for pid, name in names.items():
        above = pid
        while above in parents and above != root:
            above = parents[above]
        if above == root and pid != root:
            yield pid, name
