"""From bytes to fields in one process, by our decoders and layouts and by transformers."""

import asyncio
import io
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from ops.harness.samples import Samples
from shared.config.schema import ModelConfig, RendererConfig
from shared.helpers.process_usage import usage_of
from shared.models.families.qwen2_audio import Qwen2AudioLayout
from shared.protocol.multimodal import AUDIO, DEFAULT_SAMPLING, VIDEO, Modality
from workers.renderer.media.decoders import MediaDecoders
from workers.renderer.processing.processor import Processor
from workers.renderer.threads import Args, Result

Process = Callable[[bytes], str]
"""Processes a file, and returns a description of the output."""
FIELD = "content"
POLL_S = 0.002


@dataclass(frozen=True, slots=True)
class Timing:
    p50_ms: float
    p99_ms: float
    cpu_ms: float
    """Mean processor time of this process and, of ours, of the decoders."""
    output: str

    def row(self) -> tuple[str, ...]:
        return *(f"{ms:.1f}" for ms in (self.p50_ms, self.p99_ms, self.cpu_ms)), self.output


async def _in_thread(function: Callable[[*Args], Result], *args: *Args) -> Result:
    return await asyncio.to_thread(function, *args)


@contextmanager
def _decoding(
    modality: Modality, pack: Callable[[Any], int]
) -> Iterator[tuple[Process, MediaDecoders]]:
    """Yield a function that decodes and packs a file, and the decoders that it uses."""
    decoders = MediaDecoders(RendererConfig(), _in_thread)
    decoders.start()

    def process(data: bytes) -> str:
        with decoders.open(modality, data, FIELD) as media:
            return f"{pack(media)} tokens"

    try:
        yield process, decoders
    finally:
        decoders.close()


def ours(folder: Path, modality: Modality) -> AbstractContextManager[tuple[Process, MediaDecoders]]:
    """Return a context with a function from a file to the fields that the engine would get."""
    processor = Processor(ModelConfig(str(folder)))
    return _decoding(modality, lambda media: processor.process(media, FIELD, "").num_tokens)


def our_features(folder: Path) -> AbstractContextManager[tuple[Process, MediaDecoders]]:
    """Return the same for a feature extractor alone, as Qwen2-Audio has it."""
    tower = SimpleNamespace(num_mel_bins=128, max_source_positions=1500)
    layout = Qwen2AudioLayout(folder, SimpleNamespace(audio_config=tower))

    def pack(media: Any) -> int:
        plan = layout.plan(media.probe, DEFAULT_SAMPLING, FIELD)
        return layout.pack(media.read(plan), plan, FIELD)[1]

    return _decoding(AUDIO, pack)


def spawner_pid(decoders: MediaDecoders) -> int:
    pid = decoders._tools.pool.forks.pid
    assert pid is not None
    return pid


def measure(process: Process, files: list[bytes], spawner: int | None) -> Timing:
    """Process each file once; the first is not counted."""
    output = process(files[0])
    took_ms = Samples()
    before_s = _cpu_s(spawner)
    for file in files[1:]:
        began = time.perf_counter()
        process(file)
        took_ms.append(1000 * (time.perf_counter() - began))
    time.sleep(0.05)  # the last decoder has been waited for
    cpu_ms = 1000 * (_cpu_s(spawner) - before_s) / len(took_ms)
    return Timing(took_ms.median, took_ms.p99, cpu_ms, output)


def _cpu_s(spawner: int | None) -> float:
    return time.process_time() + (usage_of(spawner).cpu_s if spawner is not None else 0.0)


def watch_decoder(spawner: int, stop: Callable[[], bool]) -> int:
    """Return the largest private memory of any decoder until `stop`, in KiB."""
    peak = 0
    while not stop():
        with suppress(OSError):
            children = Path(f"/proc/{spawner}/task/{spawner}/children").read_text().split()
            for child in children:
                rollup = Path(f"/proc/{child}/smaps_rollup").read_text()
                private = [line for line in rollup.splitlines() if line.startswith("Private_")]
                peak = max(peak, sum(int(line.split()[1]) for line in private))
        time.sleep(POLL_S)
    return peak


def peak_kib() -> int:
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])


def transformers_audio(folder: Path) -> Process:
    """Return soundfile, soxr and transformers' feature extractor as a function."""
    import soundfile
    import soxr
    from transformers import AutoFeatureExtractor

    load: Any = AutoFeatureExtractor.from_pretrained
    extractor = load(folder, local_files_only=True)

    def process(data: bytes) -> str:
        samples, rate = soundfile.read(io.BytesIO(data), dtype="float32")
        mono = soxr.resample(samples.mean(axis=1), rate, extractor.sampling_rate, quality="HQ")
        output = extractor(
            mono,
            sampling_rate=extractor.sampling_rate,
            return_attention_mask=True,
            padding="max_length",
            return_tensors="pt",
        )
        num_frames = int(output["attention_mask"].sum())
        return f"{((num_frames - 1) // 2 - 1) // 2 + 1} tokens"

    return process


MODALITIES = {"video": VIDEO, "sound": AUDIO}
