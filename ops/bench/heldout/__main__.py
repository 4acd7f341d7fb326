"""Measure workloads that nothing was tuned on, over HTTP, compared with a peer in the same run.

    python -m ops.bench.heldout [--peers FOLDER]

- 64 requests of mixed lengths that arrive at random times
- 32 sampled requests with top_p, top_k, penalties and, for every fourth, a grammar
- a prompt of 4,096 tokens, alone and during 16 decodes; the times to its first token are compared
- with Qwen2-VL instead: 4 requests with 4 images of several sizes each, a prompt of 16,000 tokens

The peer is vLLM's server where FOLDER has it, and otherwise transformers in a plain loop: one
request after the other, without presence penalties and grammars. Both take turns in alternating
order. Ratios above 1 mean that Pagemill is better.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvloop

from ops.bench.gateway.transports import OverHttp, Times, Transport
from ops.bench.heldout import workloads
from ops.bench.heldout.plain_loop import PlainLoop
from ops.bench.heldout.workloads import Arrival
from ops.bench.peers.workloads import Maker
from ops.bench.servers import bench_tree, model_in, vllm_if_installed
from ops.harness import machine
from ops.harness.deployment import deployment
from ops.harness.samples import Samples, in_turns
from ops.harness.tables import print_table
from shared.telemetry import logs
from workers.settings import DEMO_MODEL

TEXT_MODEL, SEEING_MODEL = "smollm2-135m", "mid-qwen2vl"
LONG_PROMPTS = {TEXT_MODEL: 4096, SEEING_MODEL: 16_000}
OURS = "pagemill"
ROUNDS = 2
SPARE_TOKENS = 512
"""Tokens of a model's context beyond the long prompt."""
LONG, DURING = "long prompt", "during 16 decodes"

Figures = dict[str, dict[str, Samples]]
"""Figures of the rounds, by workload and figure, and by server."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peers", type=Path, default=Path("peers"), help="has models and vLLM")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="counted rounds of each server")
    parser.add_argument(
        "--model", choices=LONG_PROMPTS, default=TEXT_MODEL, help="the served model"
    )
    options = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    peers = options.peers.absolute()
    model = model_in(peers, options.model)
    with machine.alone(), tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        folder = Path(name)
        with vllm_if_installed(peers, folder, str(model), _vllm_options(model)) as url:
            figures = uvloop.run(_measure(model, folder, url, options.rounds))
    peer = "transformers" if url is None else "vllm"
    columns = ("workload", "figure", OURS, peer, f"of {peer}")
    title = f"medians of {options.rounds} rounds, {model.name}"
    print_table(title, columns, rows(figures, peer), num_texts=2)


def rows(figures: dict[str, Figures], peer: str) -> Iterator[tuple[str, ...]]:
    """Return each figure of both servers, and how many times as good ours is: medians of rounds."""
    for workload, by_server in figures.items():
        for figure, mine in by_server[OURS].items():
            cells = ["-", "-"]
            if theirs := by_server.get(peer, {}).get(figure):
                pairs = zip(mine, theirs, strict=True)
                ratios = Samples(workloads.ratio(figure, *pair) for pair in pairs)
                cells = [f"{theirs.median:.3g}", f"{ratios.median:.2f}"]
            yield workload, figure, f"{mine.median:.3g}", *cells


def _vllm_options(model: Path) -> list[str]:
    options = ["--dtype", "bfloat16", "--max-num-seqs", "32"]
    options += ["--max-model-len", str(_long_prompt(model) + SPARE_TOKENS)]
    if model.name == SEEING_MODEL:
        options += ["--limit-mm-per-prompt", '{"image": 4, "video": 0}']
    return options


def _long_prompt(model: Path) -> int:
    return LONG_PROMPTS.get(model.name, LONG_PROMPTS[TEXT_MODEL])


async def _measure(model: Path, folder: Path, url: str | None, rounds: int) -> dict[str, Figures]:
    config = msgspec.json.decode((model / "config.json").read_bytes())
    text = config.get("text_config", config)
    long_prompt = _long_prompt(model)
    max_model_len = min(long_prompt + SPARE_TOKENS, text["max_position_embeddings"])
    figures: dict[str, Figures] = defaultdict(lambda: defaultdict(lambda: defaultdict(Samples)))
    async with deployment(bench_tree(model, max_model_len)) as site:
        servers: dict[str, Transport] = {OURS: OverHttp(site.http)}
        if url is not None:
            servers["vllm"] = OverHttp(url)
        else:
            servers["transformers"] = PlainLoop(str(model), model == DEMO_MODEL)
        # The first round compiles, connects and fills caches.
        for number, name in in_turns([*servers], rounds, warm_ups=1):
            # The same requests for both; others in each round, so that no cache is warm.
            rng = random.Random(1000 * number + 1023)
            maker = Maker(rng, text["vocab_size"], folder)
            arrivals = _workloads(maker, rng, model, max_model_len)
            values = await _round(servers[name], arrivals, name)
            _report_round(number, name, values)
            if number >= 0:
                for workload, figure, value in values:
                    figures[workload][name][figure].append(value)
    return figures


def _report_round(number: int, name: str, values: list[tuple[str, str, float]]) -> None:
    """Write the figures of one round, before the run has ended."""
    cells = [f"{workload}: {figure} {value:.3g}" for workload, figure, value in values]
    sys.stderr.write(f"round {number}, {name}: {', '.join(cells)}\n")


def _workloads(
    maker: Maker, rng: random.Random, model: Path, max_model_len: int
) -> dict[str, list[Arrival]]:
    """Return the requests of a round by workload. The last workload has several parts."""
    long_prompts = [
        [workloads.long_prompt(maker, _long_prompt(model), max_model_len)] for _ in range(3)
    ]
    if model.name == SEEING_MODEL:
        first = {"16 images in 4 requests": workloads.images(maker)}
    else:
        first = {
            "64 arrivals": workloads.poisson(maker, rng),
            "32 sampled": workloads.sampled(maker),
        }
    return {
        **first,
        LONG: long_prompts[0],
        DURING: [*workloads.decodes(maker), *long_prompts[1], *long_prompts[2]],
    }


async def _round(
    server: Transport, by_workload: dict[str, list[Arrival]], name: str
) -> list[tuple[str, str, float]]:
    values = []
    during = by_workload.pop(DURING)
    for workload, arrivals in by_workload.items():
        began_s = time.perf_counter()
        times = await asyncio.gather(*(_arrive(server, arrival) for arrival in arrivals))
        took_s = time.perf_counter() - began_s
        num_tokens = sum(arrival.prepared.request.max_tokens for arrival in arrivals)
        for figure, value in workloads.figures(times, num_tokens, took_s):
            values.append((workload, figure, value))
    if name != "transformers":  # It computes one request at a time.
        values += await _during_decodes(server, *during)
    return values


async def _during_decodes(server: Transport, *arrivals: Arrival) -> list[tuple[str, str, float]]:
    """Send a long prompt while other requests decode; return its first token and their gaps.

    The last two arrivals are long prompts. The second of them is sent alone, for comparison.
    """
    *others, first, second = arrivals
    decoding = [asyncio.create_task(_arrive(server, each)) for each in others]
    # Most decode by then, and none has ended.
    await asyncio.sleep(0.3)
    prompt = await _arrive(server, first)
    times = await asyncio.gather(*decoding)
    alone = await _arrive(server, second)
    return [
        (DURING, "first token_s", prompt.first_s),
        (DURING, "times as long as alone_s", prompt.first_s / alone.first_s),
        *((DURING, figure, value) for figure, value in workloads.gaps(times)),
    ]


async def _arrive(server: Transport, arrival: Arrival) -> Times:
    await asyncio.sleep(arrival.after_s)
    return await server(arrival.prepared)


if __name__ == "__main__":
    main()
