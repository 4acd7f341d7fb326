"""Measure videos and sounds: bytes to fields, requests a second, images during hostile videos.

Our decoders and layouts take turns with PyAV, soundfile and transformers' processors, in one
process with one thread. Only transformers' video processor has a separate process, because it needs
torchvision, which the product does not. That process finds it in the folder of `--torchvision`.
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

from ops.bench.media import fields
from ops.bench.media.clips import SIZE, make_clip, make_speech, renamed
from ops.bench.media.fields import Timing, measure
from ops.bench.media.interference import MAX_P95, Measuring
from ops.bench.media.serving import Images, measure_rates, serving
from ops.harness.tables import console, print_table
from shared.telemetry import logs
from workers.settings import DEMO_MODEL

REFERENCE = "ops.bench.media.transformers_video"
NUM_FRAMES = 20
MAX_PIXELS = 644 * 364
MAX_MODEL_LEN = 32_768
MAX_FIELDS_MS, MAX_FEATURES_MS, MAX_DECODER_KIB = 1500.0, 60.0, 100 * 1024
MIN_REPEATED = 20.0
COLUMNS = ("by", "p50 ms", "p99 ms", "processor ms", "output")
INTERFERENCE_COLUMNS = (
    "the others", "files a second",
    "p50 alone", "p50 with them", "p95 alone", "p95 with them", "p95 x",
)  # fmt: skip


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


Missed = list[str]
"""Goals that were missed, in words."""


def measure_fields(folder: Path, count: int, torchvision: Path) -> Missed:
    """Print the times from a file to fields, of our code and of transformers."""
    clip = make_clip()
    clips = [renamed(clip) for _ in range(count + 1)]
    video_model = write_video_model(folder / "video")
    with fields.ours(video_model, fields.MODALITIES["video"]) as (process, decoders):
        process(clips[0])
        spawner = fields.spawner_pid(decoders)
        before_kib = fields.peak_kib()
        decoder_kib, stop = _watching(spawner)
        ours = measure(process, clips, spawner)
        stop()
    grown_kib = fields.peak_kib() - before_kib
    rows = [("Pagemill", *ours.row())]
    theirs = _measure_apart(video_model, NUM_FRAMES, clip, count, torchvision)
    if theirs is None:
        console.print(f"no row of transformers: torchvision does not load from {torchvision}")
    else:
        rows.append(("PyAV, transformers", *theirs.row()))
        ratios = (ours.p50_ms / theirs.p50_ms, ours.p99_ms / theirs.p99_ms)
        cells = [f"{ratio:.2f}" for ratio in (*ratios, ours.cpu_ms / theirs.cpu_ms)]
        rows.append(("ratio", *cells, ""))
    title = f"10 s of {SIZE[0]} x {SIZE[1]}, {NUM_FRAMES} frames"
    print_table(f"bytes to fields, one file after the other: {title}", COLUMNS, rows)
    console.print(
        f"memory of Pagemill: {grown_kib} KiB in this process, {decoder_kib()} KiB in a decoder"
    )
    missed = []
    if ours.p50_ms > MAX_FIELDS_MS:
        missed.append(f"a clip took {ours.p50_ms:.0f} ms")
    if decoder_kib() > MAX_DECODER_KIB:
        missed.append(f"a decoder had {decoder_kib()} KiB")
    return missed


def _measure_apart(
    folder: Path, num_frames: int, clip: bytes, count: int, torchvision: Path
) -> Timing | None:
    """Return the timing of another process that finds torchvision; None if it does not load."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(clip)
        file.flush()
        arguments = [str(folder), str(num_frames), file.name, str(count)]
        done = subprocess.run(
            [sys.executable, "-m", REFERENCE, *arguments],
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


def measure_features(folder: Path, count: int) -> Missed:
    """Print the times from ten seconds of speech to features."""
    folder.mkdir()
    kind: Any = transformers
    kind.WhisperFeatureExtractor(feature_size=128).save_pretrained(folder)
    sounds = [make_speech() + bytes([number]) for number in range(count + 1)]
    with fields.our_features(folder) as (process, decoders):
        process(sounds[0])
        ours = measure(process, sounds, fields.spawner_pid(decoders))
    theirs = measure(fields.transformers_audio(folder), sounds, None)
    rows = [("Pagemill", *ours.row()), ("soundfile, soxr, transformers", *theirs.row())]
    print_table("10 s of speech to features", COLUMNS, rows)
    return [] if ours.p50_ms < MAX_FEATURES_MS else [f"features took {ours.p50_ms:.0f} ms"]


async def measure_serving(options: argparse.Namespace) -> Missed:
    """Print the requests a second of a renderer, and the times of images during other requests."""
    missed: Missed = []
    async with serving() as (bus, sink, url):
        fresh, again = await measure_rates(bus, sink, make_clip(), options.count)
        rates = [("a new clip each", f"{fresh:.1f}"), ("one clip", f"{again:.1f}")]
        print_table("a renderer of the demo model", ("requests a second", "figure"), rates)
        if again < MIN_REPEATED * fresh:
            missed.append(f"a repeated clip is {again / fresh:.1f} times as fast as a new one")
        with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
            async with Images(sink) as images:
                await images.measure(20)
                count = options.images // options.rounds
                measuring = Measuring(bus, url, images, Path(folder), count)
                for _ in range(options.rounds):
                    await measuring.round()
                await measuring.clips()
    results = measuring.results
    rows = [(name, *times.row()) for name, times in results.items()]
    print_table("image requests during other requests, ms", INTERFERENCE_COLUMNS, rows)
    return missed + [
        f"during {name.strip()} the p95 of images is {times.ratio:.1f} x"
        for name, times in results.items()
        if times.ratio > MAX_P95
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=20, help="clips to measure")
    parser.add_argument("--images", type=int, default=200, help="images of each row")
    parser.add_argument("--rounds", type=int, default=2, help="rounds of the images")
    parser.add_argument("--torchvision", type=Path, default=Path("build/torchvision"))
    options = parser.parse_args()
    logs.configure_logging("warning", role="bench")
    torch.set_num_threads(1)
    missed: Missed = []
    with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
        missed += measure_fields(Path(name), options.count, options.torchvision)
        missed += measure_features(Path(name) / "sound", 10 * options.count)
    missed += uvloop.run(measure_serving(options))
    for goal in missed:
        console.print(f"missed: {goal}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
