"""Measure speech: the durable transport compared with a plain loop over the same weights.

- time to the first samples, p50 and p99, and the real-time factor, at 1, 4 and 16 speeches at once
- the seconds of sound that are made in a second, and their ratio at 16 and at 1
- the steps to the first samples, and the processor time of each stage
- the delay of the last sample by a kill of the talker
- images a minute, at 1, 4 and 16 requests at once, of two small painters with random weights, one
  of them Qwen-Image next to the pipeline of diffusers, which paints one image after another; the
  rows "painted before" are images of the cluster's cache of results

`python -m ops.bench.omni [ROUNDS]`: both take turns, and figures are medians of the rounds.
Speeches of both must have the same samples; otherwise the program ends with an error.
"""

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ops.bench.omni import images
from ops.bench.omni.durable import MODEL, SPECS, STEPS, TALKER, VOCODER, Site
from ops.bench.omni.figures import Level, Spoken, level_of
from ops.bench.omni.plain import PlainLoop
from ops.harness.deployment import demo_tree, deployment, preload_for
from ops.harness.tables import console, print_table
from shared.bus.bus import Bus
from shared.telemetry import logs
from workers import settings
from workers.supervisor.preloader import Preloader

LEVELS = (1, 4, 16)
ACK_WAIT_S = 4.0
NUM_KILLS = 1
"""Kills of a round."""
COLORS = ("red", "blue", "green", "yellow", "white", "black", "gray", "purple")
SHAPES = ("circles", "squares", "stars", "triangles")
IMAGE_COLUMNS = (
    "painter",
    "at once",
    "diffusers",
    "plain loop",
    "durable",
    "of diffusers",
    "of plain",
)
MAX_LESS_THROUGHPUT, MAX_MORE_FIRST_MS, MIN_BATCHED, MAX_DELAY_S = 0.1, 60.0, 3.0, ACK_WAIT_S + 2


def make_texts(number: int) -> list[str]:
    """Return different texts of about the same length."""
    pairs = [(first, second) for first in COLORS for second in COLORS if first != second]
    return [
        f"{2 + n % 4} {pairs[n % len(pairs)][0]} {SHAPES[n % len(SHAPES)]} on"
        f" {pairs[n % len(pairs)][1]}"
        for n in range(number)
    ]


def make_tree(folder: Path) -> dict[str, Any]:
    """Return a configuration of the demo voice and of the painters in a folder."""
    tree = demo_tree(spoken=True)
    tree["models"] |= images.model_configs(folder)
    return tree | {
        "delivery": {"ack_wait_s": ACK_WAIT_S},
        "engine": {"threads": 1},
        "generator": {"threads": 1},
        "log_level": "warning",
    }


@dataclass
class Images:
    """Images a minute of one painter."""

    plain: dict[int, float] = field(default_factory=dict)
    durable: dict[int, float] = field(default_factory=dict)
    cached: float = 0.0
    """At the last level, for prompts that were painted before."""
    pipeline: float | None = None
    """By the pipeline of diffusers, one image after another."""


class Round:
    """The figures of one round."""

    def __init__(self) -> None:
        self.plain: dict[int, Level] = {}
        self.durable: dict[int, Level] = {}
        self.steps: dict[str, float] = {}
        self.processor: dict[str, float] = {}
        """Milliseconds of processor time for a second of sound, at the last level."""
        self.delays_s: list[float] = []
        self.images: dict[str, Images] = {}
        """Figures by the painter's model."""


async def measure(plain: PlainLoop, site: Site, texts: Sequence[str]) -> Round:
    figures = Round()
    for at_once in LEVELS:
        some = texts if at_once > 1 else texts[: len(texts) // 2]
        used_s, began_s = time.process_time(), time.perf_counter()
        floor = await asyncio.to_thread(plain.speak, some, at_once)
        figures.plain[at_once] = level_of(at_once, floor, time.perf_counter() - began_s)
        used_s = time.process_time() - used_s
        before, began_s = site.processor_s(), time.perf_counter()
        spoken = await site.speak(some, at_once)
        figures.durable[at_once] = level_of(at_once, spoken, time.perf_counter() - began_s)
        after = site.processor_s()
        check_same(floor, spoken)
        sound_s = sum(speech.sound_s for speech in spoken)
        used = {name: after[name] - before[name] for name in after} | {"plain loop": used_s}
        figures.processor = {name: 1000 * used[name] / sound_s for name in used}
    steps = [await site.steps_of(text) for text in texts[:8]]
    figures.steps = {name: statistics.median(times[name] for times in steps) for name in STEPS}
    long = ". ".join(texts[:6])
    figures.delays_s = [await site.delay_of_kill(long) for _ in range(NUM_KILLS)]
    return figures


async def measure_images(
    bus: Bus,
    kind: images.Kind,
    painter: images.PlainPainter,
    texts: Sequence[str],
    seeds: Iterator[int],
) -> Images:
    figures = Images()
    for at_once in LEVELS:
        some = texts if at_once > 1 else texts[: len(texts) // 2]
        prompts = [images.Prompt(text, next(seeds)) for text in some]
        if kind == images.QWEN_IMAGE and at_once == 1:
            figures.pipeline = await asyncio.to_thread(images.paint_by_pipeline, prompts)
        figures.plain[at_once] = await asyncio.to_thread(painter.paint, prompts, at_once)
        figures.durable[at_once] = await images.paint_by_queue(bus, kind, prompts, at_once)
    figures.cached = await images.paint_by_queue(bus, kind, prompts, LEVELS[-1])
    return figures


def check_same(floor: Sequence[Spoken], spoken: Sequence[Spoken]) -> None:
    # In float32 a code may depend on what shares its batch.
    same = len({speech.sound for speech in floor} & {speech.sound for speech in spoken})
    if same < 0.9 * len(floor):
        raise SystemExit(f"only {same} of {len(floor)} speeches equal a speech of the plain loop")


async def run(
    tree: dict[str, Any], folder: Path, preloader: Preloader | None, rounds: int, num_texts: int
) -> list[Round]:
    plain = PlainLoop(settings.load_config(folder / "pagemill.yaml"), MODEL, TALKER, VOCODER)
    texts = make_texts(num_texts)
    plain.speak(texts[:4], 4)
    first_frames = 7
    workers = [*SPECS, *(kind.worker for kind in images.KINDS)]
    async with (
        deployment(tree, workers=workers, preloader=preloader, folder=folder) as running,
        running.bus() as bus,
    ):
        site = Site(bus, running, first_frames)
        await site.speak(texts[:8], 4)
        measured = [await measure(plain, site, texts) for _ in range(rounds)]
        seeds = itertools.count(1)
        for kind in images.KINDS:
            painter = images.PlainPainter(kind, folder)
            prompts = [images.Prompt(text, 0) for text in texts[: LEVELS[-1]]]
            await images.paint_by_queue(bus, kind, prompts, LEVELS[-1])
            for figures in measured:
                figures.images[kind.model] = await measure_images(bus, kind, painter, texts, seeds)
        return measured


# -- the report ------------------------------------------------------------------------------------


def median_level(levels: Sequence[Level]) -> Level:
    columns = zip(*levels, strict=True)
    return Level(*(statistics.median(column) for column in columns))


def print_report(rounds: Sequence[Round]) -> None:
    roads = {
        "plain loop": {n: median_level([each.plain[n] for each in rounds]) for n in LEVELS},
        "durable": {n: median_level([each.durable[n] for each in rounds]) for n in LEVELS},
    }
    rows = [
        (
            road,
            n,
            f"{level.first_p50_ms:.0f}",
            f"{level.first_p99_ms:.0f}",
            f"{level.realtime_factor:.3f}",
            f"{level.throughput:.1f}",
        )
        for road, levels in roads.items()
        for n, level in levels.items()
    ]
    columns = ("road", "at once", "first p50 ms", "first p99 ms", "real-time factor", "sound s / s")
    print_table("speeches", columns, rows)
    steps = {name: statistics.median(each.steps[name] for each in rounds) for name in STEPS}
    console.print("first samples, ms: " + ", ".join(f"{k} {v:.0f}" for k, v in steps.items()))
    used = {k: statistics.median(each.processor[k] for each in rounds) for k in rounds[0].processor}
    parts = ", ".join(f"{name} {value:.1f}" for name, value in used.items())
    console.print(f"processor ms for a second of sound, at {LEVELS[-1]}: {parts}")
    console.print(*goals(roads, rounds), sep="\n")
    print_table("images a minute", IMAGE_COLUMNS, image_rows(rounds))


def goals(roads: dict[str, dict[int, Level]], rounds: Sequence[Round]) -> list[str]:
    plain, durable = roads["plain loop"], roads["durable"]
    less = 1 - durable[16].throughput / plain[16].throughput
    more_ms = durable[1].first_p50_ms - plain[1].first_p50_ms
    batched = durable[16].throughput / durable[1].throughput
    delay_s = max(delay for each in rounds for delay in each.delays_s)
    checks = [
        ("less sound at 16", less, MAX_LESS_THROUGHPUT, less <= MAX_LESS_THROUGHPUT),
        ("later first samples at 1, ms", more_ms, MAX_MORE_FIRST_MS, more_ms <= MAX_MORE_FIRST_MS),
        ("times the sound at 16 of that at 1", batched, MIN_BATCHED, batched >= MIN_BATCHED),
        ("last sample later by a kill, s", delay_s, MAX_DELAY_S, delay_s <= MAX_DELAY_S),
    ]
    plain_batched = plain[16].throughput / plain[1].throughput
    return [
        *(
            f"{name}: {value:.2f}, the goal is {goal:.2f}: {'reached' if ok else 'MISSED'}"
            for name, value, goal, ok in checks
        ),
        f"the plain loop makes {plain_batched:.2f} times as much at 16",
    ]


def image_rows(rounds: Sequence[Round]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for kind in images.KINDS:
        figures = [each.images[kind.model] for each in rounds]
        pipelines = [each.pipeline for each in figures if each.pipeline is not None]
        pipeline = statistics.median(pipelines) if pipelines else None
        for at_once in LEVELS:
            plain = statistics.median(each.plain[at_once] for each in figures)
            durable = statistics.median(each.durable[at_once] for each in figures)
            peer = ("-", "-")
            if pipeline is not None:
                peer = f"{pipeline:.0f}", f"{durable / pipeline:.2f}"
            values = (peer[0], f"{plain:.0f}", f"{durable:.0f}", peer[1], f"{durable / plain:.2f}")
            rows.append((kind.model, str(at_once), *values))
        cached = statistics.median(each.cached for each in figures)
        level = f"{LEVELS[-1]}, painted before"
        rows.append((kind.model, level, "-", "-", f"{cached:.0f}", "-", "-"))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("rounds", type=int, nargs="?", default=3, help="rounds of all figures")
    parser.add_argument("num_texts", type=int, nargs="?", default=48, help="texts of a round")
    options = parser.parse_args()
    logs.configure_logging("error", role="bench")
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        folder = Path(name)
        images.write_painters(folder)
        tree = make_tree(folder)
        preloader = preload_for(tree, folder)
        torch.set_num_threads(1)
        rounds = asyncio.run(run(tree, folder, preloader, options.rounds, options.num_texts))
    print_report(rounds)


if __name__ == "__main__":
    main()
