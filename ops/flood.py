"""`make flood`: measure how much longer a tenant waits for its answers while another one floods.

A tenant sends short texts at a steady rate to a `pagemill up` with the demo model. In turn, 24
senders of another tenant send each of the floods below, over HTTP and over NATS. Floods over HTTP
use a key without limits, which is the default, and then a key with `max_concurrent`. The figures
are the steady tenant's times during each flood, divided by its times in the quiet phases.
"""

import argparse
import asyncio
import base64
import hashlib
import io
import json
import multiprocessing
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import nats
import numpy as np
import uvloop
from nats.aio.client import Client
from nats.errors import Error as NatsError
from PIL import Image

from ops.harness.deployment import Deployment, demo_tree, deployment, preload_for
from ops.harness.load import at_rate
from ops.harness.samples import Samples
from ops.harness.tables import console, print_table
from shared.telemetry import logs
from workers.keyring import DEFAULT_TENANT, Keyring

MODEL, CHAT = "demo", "/v1/chat/completions"
STEADY, FLOODING, LIMITED = "steady", "flooding", "limited"
SHORT = 4
"""Tokens of an answer of the steady tenant, and of the smallest requests of a flood."""
SENDERS = 24
MAX_CONCURRENT = 2
"""Limit of the second key of the flooding tenant."""
GOALS = {FLOODING: 3.0, LIMITED: 1.5}
"""Limits on the ratio of the p95, by key."""
GOAL_P50 = 5.0
SIDE = 1500
"""Pixels of each side of a large image."""
SOCKETS = 50
"""Idle connections of each sender."""
UNREAD_S = 5.0
"""Time in which a sender does not read its stream, or uses its idle connections."""
REFUSED_S = 1.0
"""Pause of a sender after a refusal, which is the gateway's Retry-After."""
BUS_CONNECTIONS = 8
PAUSE_S = 3.0
LEAD_S = 2.0
"""The flood is under way when the steady tenant's answers begin to count."""


def _key(name: str) -> str:
    return f"pm-flood-{name}"


def config() -> dict[str, Any]:
    keys: list[dict[str, Any]] = [
        {
            "name": name,
            "sha256": hashlib.sha256(_key(name).encode()).hexdigest(),
            "tenant": STEADY if name == STEADY else DEFAULT_TENANT,
        }
        for name in (STEADY, FLOODING, LIMITED)
    ]
    keys[-1]["max_concurrent"] = MAX_CONCURRENT
    gateway = {"page": False, "api_keys": keys}
    return demo_tree(sampling_defaults={}) | {"gateway": gateway, "log_level": "warning"}


def _body(content: object, max_tokens: int, **more: object) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps(
        {"model": MODEL, "messages": messages, "max_tokens": max_tokens, **more}
    ).encode()


def _bus_body(text: str, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": text}]
    sampling = {"max_tokens": max_tokens, "ignore_eos": True}
    body = {"model": MODEL, "messages": messages, "sampling_params": sampling}
    return json.dumps(body).encode()


def _large_images(rng: random.Random) -> list[bytes]:
    """Images of noise, which compress badly."""
    files = []
    for _ in range(4):
        pixels = np.frombuffer(rng.randbytes(SIDE * SIDE * 3), np.uint8).reshape(SIDE, SIDE, 3)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=60)
        files.append(file.getvalue())
    return files


def _client(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(
        base_url=url,
        timeout=120,
        limits=httpx.Limits(max_connections=None),
        headers={"authorization": f"Bearer {_key(key)}", "content-type": "application/json"},
        trust_env=False,
    )


@dataclass
class Measured:
    """Answers of the steady tenant."""

    took: Samples = field(default_factory=Samples)
    """Seconds of each answer."""
    errors: Counter[str] = field(default_factory=Counter)
    """Numbers of errors by status."""

    async def send(self, http: httpx.AsyncClient, rate: float, lasts_s: float) -> None:
        """Send short texts at a steady rate."""

        async def one(number: int) -> None:
            began = time.monotonic()
            answer = await http.post(CHAT, content=_body(f"what is {number}?", SHORT, seed=number))
            if answer.is_success:
                self.took.append(time.monotonic() - began)
            else:
                self.errors[str(answer.status_code)] += 1

        await at_rate(rate, one, lambda number: number >= rate * lasts_s)


class Site(NamedTuple):
    """Addresses of a deployment, and the file with the flooding tenant's key."""

    http: str
    bus: str
    seed: str

    @classmethod
    def of(cls, site: Deployment) -> "Site":
        seed = Keyring(site.folder / "nats" / "keys").file_of_tenant(DEFAULT_TENANT)
        return cls(site.http, site.url, str(seed))


class Flood:
    """The senders of the flooding tenant, in a separate process."""

    def __init__(self, site: Site, key: str, random_numbers: random.Random) -> None:
        self._site = site
        self._rng = random_numbers
        self._images = _large_images(random_numbers)
        self._http = _client(site.http, key)
        self._connections: list[Client] = []
        self._answered = self._unique()
        """Id of the request that clients read again."""

    async def send(self, flood: str, lasts_s: float) -> Counter[str]:
        """Send requests of a flood until the end; return the number of each outcome."""
        for _ in range(BUS_CONNECTIONS):
            nc = await nats.connect(self._site.bus, nkeys_seed=self._site.seed)
            self._connections.append(nc)
        await self._ask(self._answered, _bus_body("count", 200))
        outcomes: Counter[str] = Counter()
        until_s = time.monotonic() + lasts_s

        async def send_until_end() -> None:
            while time.monotonic() < until_s:
                try:
                    outcomes[await FLOODS[flood](self)] += 1
                except (httpx.HTTPError, NatsError, OSError) as error:
                    outcomes[type(error).__name__] += 1
                    await asyncio.sleep(REFUSED_S)

        await asyncio.gather(*(send_until_end() for _ in range(SENDERS)))
        for nc in self._connections:
            await nc.close()
        await self._http.aclose()
        return outcomes

    def _unique(self) -> str:
        return f"f{self._rng.randrange(2**60):x}"

    async def _post(self, body: bytes, headers: dict[str, str] | None = None) -> str:
        answer = await self._http.post(CHAT, content=body, headers=headers)
        if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
            await asyncio.sleep(REFUSED_S)
        return str(answer.status_code)

    async def smallest(self) -> str:
        return await self._post(_body(self._unique(), SHORT))

    async def long(self) -> str:
        return await self._post(_body(self._unique() + " x" * 350, 200, ignore_eos=True))

    async def image(self) -> str:
        # Bytes after the end of an image make a new file of it.
        unique = self._unique()
        data = base64.b64encode(self._rng.choice(self._images) + unique.encode()).decode()
        url = {"url": f"data:image/jpeg;base64,{data}"}
        parts = [{"type": "image_url", "image_url": url}, {"type": "text", "text": unique}]
        return await self._post(_body(parts, 16))

    async def grammar(self) -> str:
        unique = self._unique()
        fields = {f"{unique}{i}": {"type": "string", "maxLength": 40} for i in range(20)}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        return await self._post(_body(unique, 64, response_format=form))

    async def unread(self) -> str:
        body = _body(self._unique(), 900, ignore_eos=True, stream=True)
        async with self._http.stream("POST", CHAT, content=body) as answer:
            await asyncio.sleep(UNREAD_S if answer.is_success else REFUSED_S)
            return str(answer.status_code)

    async def repeated(self) -> str:
        """Send two requests with one id, and cancel them."""
        name, body = self._unique(), _body("count", 900, ignore_eos=True)
        both = [self._post(body, {"x-request-id": name}) for _ in range(2)]
        answers = asyncio.gather(*both)
        await asyncio.sleep(0.05)
        await self._http.delete(f"/v1/requests/{name}")
        return "+".join(await answers)

    async def idle(self) -> str:
        """Open connections that send half of a request."""
        url = urlsplit(self._site.http)
        writers = []
        for _ in range(SOCKETS):
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(b"GET / HTTP/1.1\r\n")
            writers.append(writer)
        await asyncio.sleep(UNREAD_S)
        for writer in writers:
            writer.close()
        return "opened"

    async def over_nats(self) -> str:
        return await self._ask(self._unique(), _bus_body(self._unique(), SHORT))

    async def invalid(self) -> str:
        return await self._ask(self._unique(), b'{"model": "demo", "unknown": 1}')

    async def read(self) -> str:
        nc = self._rng.choice(self._connections)
        reply = await nc.request(f"pm.read.{self._answered}", timeout=60)
        return "read" if "records" in json.loads(reply.data) else reply.data.decode()

    async def _ask(self, request_id: str, body: bytes) -> str:
        """Send a request over NATS, and return the type of the final record."""
        nc = self._rng.choice(self._connections)
        log = await nc.subscribe(f"pm.tokens.{request_id}")
        await nc.jetstream().publish(f"pm.request.{MODEL}.{request_id}", body)
        while (record := json.loads((await log.next_msg(timeout=120)).data))["type"] == "tokens":
            pass
        await log.unsubscribe()
        return str(record["error"]["code"] if record["type"] == "error" else record["type"])


FLOODS: dict[str, Callable[[Flood], Awaitable[str]]] = {
    "smallest requests": Flood.smallest,
    "long texts": Flood.long,
    "large images": Flood.image,
    "grammars": Flood.grammar,
    "streams without a reader": Flood.unread,
    "repeated ids, cancelled": Flood.repeated,
    "idle connections": Flood.idle,
    "smallest requests over NATS": Flood.over_nats,
    "invalid requests over NATS": Flood.invalid,
    "reads over NATS": Flood.read,
}


def run_flood(flood: str, site: Site, key: str, lasts_s: float) -> Counter[str]:
    """Flood a deployment. Another process runs this function."""
    sender = Flood(site, key, random.Random(time.time_ns()))
    return uvloop.run(sender.send(flood, lasts_s))


def come_first() -> bool:
    """Let this process run whenever it can, and return whether Linux permits it.

    It stands for a client on another machine, which does not wait for these processors.
    """
    try:
        # Child processes keep the usual priority.
        policy = os.SCHED_RR | os.SCHED_RESET_ON_FORK
        os.sched_setscheduler(0, policy, os.sched_param(1))
    except PermissionError:
        return False
    return True


Phase = tuple[str, str]
"""A flood and the key that it uses; both are empty for a quiet phase."""
QUIET: Phase = ("", "")


async def _measure(
    running: AbstractAsyncContextManager[Deployment],
    phases: list[Phase],
    rate: float,
    phase_s: float,
    rounds: int,
) -> tuple[dict[Phase, Measured], dict[Phase, Counter[str]]]:
    """Return the steady tenant's answers in each phase, and the outcomes of the floods."""
    measured = {phase: Measured() for phase in (QUIET, *phases)}
    outcomes: dict[Phase, Counter[str]] = {phase: Counter() for phase in phases}
    async with running as deployed:
        site = Site.of(deployed)
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            loop = asyncio.get_running_loop()
            # The process starts before this one has another priority.
            for flood in dict.fromkeys(flood for flood, _ in phases):
                await loop.run_in_executor(process, run_flood, flood, site, FLOODING, 1.0)
            if not come_first():
                console.print("not root: times include the client's waits for a processor")
            async with _client(site.http, STEADY) as http:
                for _ in range(rounds):
                    for phase in phases:
                        await asyncio.sleep(PAUSE_S)
                        await measured[QUIET].send(http, rate, phase_s / 2)
                        lasts_s = LEAD_S + phase_s
                        flooding = loop.run_in_executor(
                            process, run_flood, phase[0], site, phase[1], lasts_s
                        )
                        await asyncio.sleep(LEAD_S)
                        await measured[phase].send(http, rate, phase_s)
                        outcomes[phase] += await flooding
    return measured, outcomes


def _show(measured: dict[Phase, Measured], outcomes: dict[Phase, Counter[str]]) -> None:
    quiet = measured[QUIET].took
    rows = [
        (
            flood or "none",
            MAX_CONCURRENT if key == LIMITED else "",
            len(answers.took),
            answers.errors.total(),
            *(f"{1000 * s:.0f} ms" for s in (answers.took.median, answers.took.p95)),
            f"{answers.took.median / quiet.median:.1f}",
            f"{answers.took.p95 / quiet.p95:.1f}",
            GOALS.get(key, ""),
        )
        for (flood, key), answers in measured.items()
    ]
    columns = (
        "flood",
        "limit",
        "answers",
        "errors",
        "p50",
        "p95",
        f"ratio of p50, goal {GOAL_P50}",
    )
    print_table("answers of the steady tenant", (*columns, "ratio of p95", "goal"), rows)
    for (flood, key), counted in outcomes.items():
        console.print(f"{flood}, {key}: {dict(sorted(counted.items()))}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=float, default=4.0, help="steady requests a second")
    parser.add_argument("--phase", type=float, default=10.0, help="seconds of a flood")
    parser.add_argument("--rounds", type=int, default=1, help="phases of each kind")
    parser.add_argument("--floods", nargs="*", default=list(FLOODS), help="names of floods")
    options = parser.parse_args()
    logs.configure_logging("error", role="flood")
    phases = [
        (flood, key)
        for flood in options.floods
        for key in (FLOODING, LIMITED)
        if key == FLOODING or not flood.endswith("NATS")
    ]
    with tempfile.TemporaryDirectory(prefix="pagemill-") as name:
        folder, tree = Path(name), config()
        running = deployment(tree, folder=folder, preloader=preload_for(tree, folder))
        measuring = _measure(running, phases, options.rate, options.phase, options.rounds)
        _show(*uvloop.run(measuring))


if __name__ == "__main__":
    main()
