"""Measure what HTTP costs: the same requests over NATS, through the gateway, and through vLLM.

    python -m ops.bench.gateway [--peers FOLDER]

FOLDER has models, and vLLM as `vllm`; `ops/bench/peers/install.sh FOLDER` creates both. Without
models the demo model is used, and without vLLM its row is left out. Text is sent as token ids to
/v1/completions, images to /v1/chat/completions. All answers are streamed, greedy and of full
length. No prompt is repeated.

The first table has one request at a time, with a short answer, on an idle engine. Its difference
to NATS is computed for each pair of requests. The others have bursts of 1, 8 and 32. All servers
take turns at every repetition, in alternating order, and vLLM gets a pause after its turn.
"""

import argparse
import asyncio
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import msgspec
import uvloop

from ops.bench.burst import Burst
from ops.bench.gateway import report
from ops.bench.gateway.transports import OverHttp, OverNats, Prepared, Transport
from ops.bench.peers.protocol import Request
from ops.bench.peers.workloads import Maker
from ops.bench.servers import bench_tree, model_in, vllm_if_installed
from ops.harness import machine
from ops.harness.deployment import deployment
from ops.harness.samples import Samples, in_turns
from ops.harness.tables import print_table
from shared.telemetry import logs

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
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="has models and vLLM")
    options = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    for work in WORKS:
        with machine.alone(), tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
            _measure(work, options.peers.absolute(), Path(name))


def _measure(work: Work, peers: Path, folder: Path) -> None:
    model = model_in(peers, work.model)
    with vllm_if_installed(peers, folder, str(model), VLLM_OPTIONS, patient=False) as url:
        singles, bursts = uvloop.run(_compare(work, model, folder, url))
    title = f"{work.name}, {model.name}"
    print_table(f"{title}: one at a time", report.SINGLES, report.of_singles(singles))
    for load in LOADS:
        print_table(f"{title}: {load} at once", report.BURSTS, report.of_bursts(bursts[load]))


Bursts = dict[int, dict[str, list[Burst]]]


async def _compare(
    work: Work, model: Path, folder: Path, vllm_url: str | None
) -> tuple[dict[str, Samples], Bursts]:
    requests = _Requests(work, model, folder)
    async with deployment(bench_tree(model, MAX_MODEL_LEN)) as site, site.bus() as bus:
        pids = {name: site.processes()[name] for name in ("gateway", "engine", "broker")}
        transports: dict[str, Transport] = {"nats": OverNats(bus), "gateway": OverHttp(site.http)}
        if vllm_url is not None:
            transports["vllm"] = OverHttp(vllm_url)
        # The first request of each shape compiles, connects and fills caches.
        for load in LOADS:
            for transport in transports.values():
                await _burst(transport, requests.make(load, SHORT), pids)
        singles = await _singles(work, transports, requests)
        return singles, await _bursts(work, transports, requests, pids)


async def _singles(
    work: Work, transports: dict[str, Transport], requests: "_Requests"
) -> dict[str, Samples]:
    """Return the seconds to the first token, by transport."""
    singles = {name: Samples() for name in transports}

    async def run(name: str) -> None:
        (request,) = requests.make(1, SHORT)
        singles[name].append((await transports[name](request)).first_s)
        await asyncio.sleep(PAUSE_S)

    for _ in range(work.singles // BLOCK):
        for _, name in in_turns(OURS, BLOCK):
            await run(name)
        for name in transports.keys() - set(OURS):
            for _ in range(BLOCK):
                await run(name)
            await asyncio.sleep(CALM_S)
    return singles


async def _bursts(
    work: Work, transports: dict[str, Transport], requests: "_Requests", pids: dict[str, int]
) -> Bursts:
    bursts: Bursts = {load: {name: [] for name in transports} for load in LOADS}
    setups = [(load, name) for load in LOADS for name in transports]
    for _, (load, name) in in_turns(setups, work.bursts):
        batch = requests.make(load, work.max_tokens)
        bursts[load][name].append(await _burst(transports[name], batch, pids))
        await asyncio.sleep(PAUSE_S if name in OURS else CALM_S)
    return bursts


async def _burst(transport: Transport, requests: list[Prepared], pids: dict[str, int]) -> Burst:
    burst = Burst(num_tokens=sum(prepared.request.max_tokens for prepared in requests))
    with burst.timed(pids):
        times = await asyncio.gather(*(transport(prepared) for prepared in requests))
    burst.first_s = [each.first_s for each in times]
    return burst


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


if __name__ == "__main__":
    main()
