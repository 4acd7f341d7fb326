"""Measure what HTTP costs: the same requests over NATS, through the gateway, and through vLLM.

    python -m ops.bench.gateway [--peers FOLDER]

FOLDER has models, and vLLM as `vllm`; `ops/bench/peers/install.sh FOLDER` creates both. Without
them the demo model is used, or vLLM left out. Text goes as token ids to /v1/completions, images to
/v1/chat/completions; all answers are streamed, greedy and of full length. No prompt is repeated.

First one request at a time, with a short answer, on an idle engine: the difference to NATS is that
of each pair. Then bursts of 1, 8 and 32. NATS and gateway take turns at every repetition, each time
in the other order; then vLLM, which is left to come to rest.
"""

import argparse
import asyncio
import contextlib
import os
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console

from ops.bench.gateway import report
from ops.bench.gateway.cluster import local_gateway
from ops.bench.gateway.report import Burst
from ops.bench.gateway.transports import OverHttp, OverNats, Prepared, Transport
from ops.bench.peers import machine
from ops.bench.peers.protocol import Request
from ops.bench.peers.workloads import Maker
from ops.bench.servers import vllm, vllm_binary
from shared.telemetry import logs
from workers import settings

LOADS = (1, 8, 32)
OURS = ("nats", "gateway")
BLOCK = 10
SHORT = 4
# Acknowledgements of a request may follow its answer within this time.
PAUSE_S = 0.02
# Processes of vLLM spin for a second after their last answer.
CALM_S = 2.0
MAX_MODEL_LEN = 2048
IMAGE_SIDE = 224
VLLM_OPTIONS = (
    "--dtype", "bfloat16", "--max-model-len", str(MAX_MODEL_LEN),
    "--max-num-seqs", "32", "--max-num-batched-tokens", "2048",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Work:
    name: str
    model: str
    images: bool
    prompt_len: int
    max_tokens: int
    singles: int
    bursts: int


WORKS = (
    Work("text", "smollm2-135m", False, 64, 64, 120, 5),
    Work("pictures", "mid-qwen2vl", True, 16, 16, 60, 3),
)


def main() -> None:
    given = _arguments()
    logs.configure_logging("warning", role="bench")
    console = Console()
    if not console.is_terminal:
        console.width = 120
    console.print(f"{machine.cpu_model()}, {os.cpu_count()} cores, {date.today().isoformat()}")
    for work in WORKS:
        if work.name in given.works:
            with machine.alone(), tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
                _measure(work, given.peers.absolute(), Path(name), console)


def _measure(work: Work, peers: Path, folder: Path, console: Console) -> None:
    found = peers / "models" / work.model
    model = found if found.is_dir() else settings.DEMO_MODEL
    binary = vllm_binary(peers)
    with _maybe(binary, folder, model) as theirs:
        singles, bursts = uvloop.run(_compare(work, model, folder, theirs))
    console.print(report.of_singles(f"{work.name}, {model.name}: one at a time", singles))
    for load in LOADS:
        console.print(report.of_bursts(f"{work.name}, {model.name}: {load} at once", bursts[load]))


@contextlib.contextmanager
def _maybe(binary: Path | None, folder: Path, model: Path) -> Iterator[str | None]:
    if binary is None:
        yield None
        return
    with vllm(binary, folder, str(model), VLLM_OPTIONS, patient=False) as url:
        yield url


Singles = dict[str, list[float]]
"""Seconds to the first token, by transport."""
Bursts = dict[int, dict[str, list[Burst]]]


async def _compare(
    work: Work, model: Path, folder: Path, theirs: str | None
) -> tuple[Singles, Bursts]:
    requests = _Requests(work, model, folder)
    async with local_gateway(model, folder, MAX_MODEL_LEN) as (cluster, bus):
        assert cluster.gateway_url is not None
        pids = {role: cluster.pids(role)[0] for role in ("gateway", "engine")}
        pids["broker"] = int((folder / "nats" / "nats-server.pid").read_text())
        transports: dict[str, Transport] = {
            "nats": OverNats(bus),
            "gateway": OverHttp(cluster.gateway_url),
        }
        if theirs is not None:
            transports["vllm"] = OverHttp(theirs)
        # The first request of each shape compiles, connects and fills caches.
        for load in LOADS:
            for transport in transports.values():
                await _burst(transport, requests.make(load, SHORT), pids)
        return await _singles(work, transports, requests), await _bursts(
            work, transports, requests, pids
        )


async def _singles(work: Work, transports: dict[str, Transport], requests: "_Requests") -> Singles:
    singles: Singles = {name: [] for name in transports}
    for _ in range(work.singles // BLOCK):
        for number in range(BLOCK):
            for name in _turn(OURS, number):
                await _single(transports[name], requests, singles[name])
        for name in transports.keys() - set(OURS):
            for _ in range(BLOCK):
                await _single(transports[name], requests, singles[name])
            await asyncio.sleep(CALM_S)
    return singles


async def _single(transport: Transport, requests: "_Requests", first_s: list[float]) -> None:
    (asked,) = requests.make(1, SHORT)
    first_s.append((await transport(asked)).first_s)
    await asyncio.sleep(PAUSE_S)


async def _bursts(
    work: Work, transports: dict[str, Transport], requests: "_Requests", pids: dict[str, int]
) -> Bursts:
    bursts: Bursts = {load: {name: [] for name in transports} for load in LOADS}
    for number in range(work.bursts):
        for load in LOADS:
            for name in [*_turn(OURS, number), *(transports.keys() - set(OURS))]:
                asked = requests.make(load, work.max_tokens)
                bursts[load][name].append(await _burst(transports[name], asked, pids))
                await asyncio.sleep(PAUSE_S if name in OURS else CALM_S)
    return bursts


async def _burst(transport: Transport, requests: list[Prepared], pids: dict[str, int]) -> Burst:
    used_s = {name: machine.used_s(pid) for name, pid in pids.items()}
    client_s, began_s = time.process_time(), time.perf_counter()
    times = await asyncio.gather(*(transport(asked) for asked in requests))
    took_s = time.perf_counter() - began_s
    cpu_s = {name: machine.used_s(pid) - used_s[name] for name, pid in pids.items()}
    cpu_s["client"] = time.process_time() - client_s
    num_tokens = sum(asked.request.max_tokens for asked in requests)
    return Burst([each.first_s for each in times], num_tokens, took_s, cpu_s)


def _turn(names: Sequence[str], number: int) -> Sequence[str]:
    return names if number % 2 else names[::-1]


class _Requests:
    """Return new requests, no two of which have a common prefix."""

    def __init__(self, work: Work, model: Path, folder: Path) -> None:
        config = msgspec.json.decode((model / "config.json").read_bytes())
        vocab_size = config.get("text_config", config)["vocab_size"]
        self._work = work
        self._maker = Maker(random.Random(17), vocab_size, folder)

    def make(self, count: int, max_tokens: int) -> list[Prepared]:
        return [Prepared.of(self._one(max_tokens)) for _ in range(count)]

    def _one(self, max_tokens: int) -> Request:
        if self._work.images:
            image = self._maker.image(IMAGE_SIDE)
            return Request(max_tokens, image=image, text=self._maker.text())
        return Request(max_tokens, self._maker.token_ids(self._work.prompt_len))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [work.name for work in WORKS]
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="has models and vLLM")
    parser.add_argument("--works", nargs="+", choices=names, default=names)
    return parser.parse_args()


if __name__ == "__main__":
    main()
