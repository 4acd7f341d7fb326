"""Measure videos and sounds: bytes to fields, requests a second, images beside hostile videos.

Our decoders and layouts take turns with PyAV, soundfile and transformers' own processors, in one
process with one thread, but for transformers' video processor: it needs torchvision, which the
product does not, and runs in a process that finds it in the folder of `--torchvision`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
import uvloop
from rich.console import Console
from rich.table import Table

from ops.bench.media import fields
from ops.bench.media.beside import MAX_P95, Measuring
from ops.bench.media.clips import SIZE, make_clip, make_speech, renamed
from ops.bench.media.fields import Timing, measure
from ops.bench.media.serving import Images, measure_rates, serving
from shared.telemetry import logs
from workers.settings import DEMO_MODEL

REFERENCE = "ops.bench.media.transformers_video"
NUM_FRAMES = 20
MAX_PIXELS = 644 * 364
MAX_MODEL_LEN = 32_768
MAX_FIELDS_MS, MAX_FEATURES_MS, MAX_DECODER_KIB = 1500.0, 60.0, 100 * 1024
MIN_REPEATED = 20.0


def write_video_model(folder: Path) -> Path:
    """Write the demo model's folder with the frames, and the context, of a larger model."""
    shutil.copytree(DEMO_MODEL, folder)
    _change(
        folder / "video_preprocessor_config.json",
        max_pixels=MAX_PIXELS,
        size={"shortest_edge": 3136, "longest_edge": MAX_PIXELS},
        max_frames=NUM_FRAMES,
    )
    config = folder / "config.json"
    text = json.loads(config.read_text()).get("text_config", {})
    _change(config, max_position_embeddings=MAX_MODEL_LEN)
    if text:
        _change(config, text_config=text | {"max_position_embeddings": MAX_MODEL_LEN})
    return folder


def _change(file: Path, **settings: object) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


def table_of_fields(folder: Path, count: int, torchvision: Path) -> tuple[Table, list[str]]:
    """Return a table of times, and the targets that were missed."""
    table = Table(title="bytes to fields, one file after the other", title_justify="left")
    for name in ("what", "by", "p50 ms", "p99 ms", "processor ms", "output"):
        table.add_column(name, justify="left" if name in ("what", "by", "output") else "right")
    missed: list[str] = []

    def add(what: str, by: str, timing: Timing) -> None:
        numbers = (timing.p50_ms, timing.p99_ms, timing.cpu_ms)
        table.add_row(what, by, *(f"{number:.0f}" for number in numbers), timing.output)

    clip = make_clip()
    clips = [renamed(clip) for _ in range(count + 1)]
    what = f"10 s of {SIZE[0]} x {SIZE[1]}, {NUM_FRAMES} frames"
    video_model = write_video_model(folder / "video")
    with fields.ours(video_model, fields.MODALITIES["video"]) as (process, decoders):
        process(clips[0])
        spawner = fields.spawner_pid(decoders)
        before_kib = fields.peak_kib()
        decoder_kib, stop = _watching(spawner)
        add(what, "Pagemill", ours := measure(process, clips, spawner))
        stop()
    memory = f"{fields.peak_kib() - before_kib} KiB here, {decoder_kib()} KiB in a decoder"
    table.add_row("its memory", "Pagemill", "", "", "", memory)
    if ours.p50_ms > MAX_FIELDS_MS:
        missed.append(f"a clip took {ours.p50_ms:.0f} ms")
    if decoder_kib() > MAX_DECODER_KIB:
        missed.append(f"a decoder had {decoder_kib()} KiB")
    other = _measure_apart(video_model, NUM_FRAMES, clip, count, torchvision)
    if other is None:
        Console().print(f"no line of transformers: torchvision does not load from {torchvision}")
    else:
        add(what, "PyAV, transformers", other)
        ratios = (
            ours.p50_ms / other.p50_ms,
            ours.p99_ms / other.p99_ms,
            ours.cpu_ms / other.cpu_ms,
        )
        table.add_row("ratio", "Pagemill to transformers", *(f"{r:.2f}" for r in ratios), "")
    return table, missed


def _measure_apart(
    folder: Path, num_frames: int, clip: bytes, count: int, torchvision: Path
) -> Timing | None:
    """Return the timing of another process that finds torchvision; None if it does not load."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(clip)
        file.flush()
        asked = [str(folder), str(num_frames), file.name, str(count)]
        done = subprocess.run(
            [sys.executable, "-m", REFERENCE, *asked],
            env=os.environ | {"PYTHONPATH": str(torchvision), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    if done.returncode:
        return None
    return Timing(**json.loads(done.stdout.splitlines()[-1]))


def _watching(spawner: int) -> tuple[Callable[[], int], Callable[[], None]]:
    """Watch the memory of decoders; return functions for the peak, and to stop."""
    peaks = [0]
    ended = threading.Event()
    thread = threading.Thread(
        target=lambda: peaks.append(fields.watch_decoder(spawner, ended.is_set))
    )
    thread.start()

    def stop() -> None:
        ended.set()
        thread.join()

    return lambda: max(peaks), stop


def table_of_features(folder: Path, count: int) -> tuple[Table, list[str]]:
    table = Table(title="10 s of speech to features", title_justify="left")
    for name in ("by", "p50 ms", "p99 ms", "processor ms", "output"):
        table.add_column(name, justify="left" if name in ("by", "output") else "right")
    folder.mkdir()
    kind: Any = transformers
    extractor = kind.WhisperFeatureExtractor(feature_size=128)
    extractor.save_pretrained(folder)
    sounds = [make_speech() + bytes([number]) for number in range(count + 1)]
    with fields.our_features(folder) as (process, decoders):
        process(sounds[0])
        ours = measure(process, sounds, fields.spawner_pid(decoders))
    other = measure(fields.transformers_audio(folder), sounds, None)
    for by, timing in (("Pagemill", ours), ("soundfile, soxr, transformers", other)):
        numbers = (timing.p50_ms, timing.p99_ms, timing.cpu_ms)
        table.add_row(by, *(f"{number:.1f}" for number in numbers), timing.output)
    missed = [] if ours.p50_ms < MAX_FEATURES_MS else [f"features took {ours.p50_ms:.0f} ms"]
    return table, missed


async def tables_of_serving(args: argparse.Namespace) -> tuple[list[Table], list[str]]:
    rates = Table(title="a renderer of the demo model", title_justify="left")
    rates.add_column("requests a second")
    rates.add_column("figure", justify="right")
    beside = Table(title="image requests beside others", title_justify="left")
    beside.add_column("the others")
    for name in ("files a second", "p50 alone", "p50 beside", "p95 alone", "p95 beside", "p95 x"):
        beside.add_column(name, justify="right")
    missed = []
    async with serving() as (bus, sink, url):
        if not args.only_beside:
            fresh, again = await measure_rates(bus, sink, make_clip(), args.count)
            rates.add_row("a new clip each", f"{fresh:.1f}")
            rates.add_row("one clip", f"{again:.1f}")
            if again < MIN_REPEATED * fresh:
                missed.append(f"a repeated clip is {again / fresh:.1f} times as fast as a new one")
        with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
            async with Images(sink) as images:
                await images.measure(20)
                measuring = Measuring(bus, url, images, Path(folder), args.images // args.rounds)
                for _ in range(args.rounds):
                    await measuring.round()
                await measuring.clips()
    for name, found in measuring.found.items():
        beside.add_row(name, *found.row())
        if found.ratio > MAX_P95:
            missed.append(f"beside {name.strip()} the p95 of images is {found.ratio:.1f} x")
    return ([] if args.only_beside else [rates]) + [beside], missed


def main(args: argparse.Namespace) -> int:
    logs.configure_logging("warning", role="bench")
    torch.set_num_threads(1)
    missed = []
    if not args.only_beside:
        with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
            for table, targets in (
                table_of_fields(Path(name), args.count, args.torchvision),
                table_of_features(Path(name) / "sound", 10 * args.count),
            ):
                Console().print(table)
                missed += targets
    tables, targets = uvloop.run(tables_of_serving(args))
    Console().print(*tables, sep="\n")
    for target in [*missed, *targets]:
        Console().print(f"missed: {target}")
    return 1 if missed or targets else 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--images", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--only-beside", action="store_true", help="only images beside others")
    parser.add_argument("--torchvision", type=Path, default=Path("build/torchvision"))
    raise SystemExit(main(parser.parse_args()))
