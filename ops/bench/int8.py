"""Compare weights of 8 and 4 bits with full ones: the same model, the same texts, the same run.

The int4 weights are a folder that this script writes: groups of 64 inputs, rounded to the nearest.
Accuracy is measured at every token of the texts, against the model in float32: the share of tokens
with the same likeliest successor, the mean Kullback-Leibler divergence, and the ratio of
perplexities. The row of bfloat16 shows the effect of that type alone. Tokens per second are at the
best of several turns, with the ratio to the first row. Peak memory is measured in a process that
only loads the weights.

    python -m ops.bench.models smollm2 FOLDER
    python -m ops.bench.int8 FOLDER [--text FILE ...]
"""

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from ops.harness.machine import peak_bytes
from ops.harness.tables import print_table
from shared.config.schema import EngineConfig, ModelConfig
from shared.native.choices import KernelSetting
from workers.engine.cpu.decoder import NativeModel
from workers.engine.loader import LoadedModel, load
from workers.engine.model.flat_model import BatchLayout, DecoderModel, StepInputs

PASSAGES = (
    "The harbour of the old town lies behind two walls of grey stone. In the morning the boats"
    " come in with herring and mackerel, and the women of the quay sort the fish into baskets. By"
    " noon the market is empty, the gulls have taken what was left, and the nets hang in the sun"
    " to dry.",
    "A pump moves water from the well to a tank on the roof. A float in the tank opens a switch"
    " when the tank is full, and closes it again when a third of the water is gone. If the well"
    " runs dry, a second switch stops the pump, and a red lamp above the door tells whoever passes"
    " by.",
)
DOCUMENTS = Path(__file__).parents[2] / "docs" / "concepts"
WINDOW = 256
NUM_REPEATS = 3
NUM_DECODED = 24
NUM_STREAMS = (1, 4, 16)
BLOCK_SIZE = 16
INT4_FOLDER = "int4"
GROUP = 64


@dataclass(frozen=True)
class Variant:
    name: str
    dtype: Any
    quantization: Any = None
    kernels: KernelSetting = "measured"
    is_int4: bool = False

    def load(self, folder: Path) -> LoadedModel:
        path = folder.parent / INT4_FOLDER if self.is_int4 else folder
        model = ModelConfig(
            path=str(path), dtype=self.dtype, quantization=self.quantization, max_model_len=1024
        )
        return load(model, EngineConfig(kernels=self.kernels, block_size=BLOCK_SIZE))


BASE = Variant("float32", "float32")
VARIANTS = (
    Variant("bfloat16", "bfloat16"),
    Variant("bfloat16 on torch", "bfloat16", kernels="torch"),
    Variant("int8, bfloat16", "bfloat16", "int8"),
    Variant("int8, float32", "float32", "int8"),
    Variant("int4, bfloat16", "bfloat16", is_int4=True),
)


def write_int4(folder: Path, target: Path) -> None:
    """Copy a model, with the linear layers of its decoder in int4, as compressed-tensors packs it.

    Symmetric integers lose more than the ones of AWQ or GPTQ, but take the same time and memory.
    """
    target.mkdir()
    for file in folder.iterdir():
        if file.is_file() and file.suffix != ".safetensors":
            shutil.copy(file, target)
    weights: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        for name, weight in load_file(file).items():
            if ".layers." in name and "visual" not in name and name.endswith("proj.weight"):
                owner = name.removesuffix(".weight")
                weights |= {f"{owner}.{part}": t for part, t in _round_int4(weight).items()}
            else:
                weights[name] = weight
    save_file(weights, target / "model.safetensors", {"format": "pt"})
    numbers = {"num_bits": 4, "strategy": "group", "group_size": GROUP}
    settings = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": numbers}},
    }
    config = json.loads((folder / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"quantization_config": settings}))
    (target / "model.safetensors.index.json").unlink(missing_ok=True)


def _round_int4(weight: Tensor) -> dict[str, Tensor]:
    groups = weight.float().unflatten(1, (-1, GROUP))
    scale = groups.abs().amax(-1) / 7.5
    codes = (groups / scale[..., None].clamp_min(1e-12) + 8).round().clamp(0, 15).flatten(1)
    words = codes.to(torch.int64).unflatten(1, (-1, 8)) << torch.arange(0, 32, 4)
    packed = words.sum(-1).to(torch.uint32).view(torch.int32)
    return {"weight_packed": packed, "weight_scale": scale}


@torch.inference_mode()
def run_step(model: DecoderModel, cache: Any, tokens: Tensor, start: int, rows: Tensor) -> Tensor:
    """Compute a step of sequences in equal states, [num_sequences, num_tokens]; return logits."""
    num_seqs, num_tokens = tokens.shape
    num_blocks = -(-(start + num_tokens) // BLOCK_SIZE)
    layout = BatchLayout(
        [range(i * num_blocks, (i + 1) * num_blocks) for i in range(num_seqs)],
        [i * num_tokens for i in range(num_seqs + 1)],
        [start + num_tokens] * num_seqs,
    )
    positions = torch.arange(start, start + num_tokens).repeat(num_seqs)
    step = StepInputs(
        model.embed(tokens.flatten()),
        positions.expand(model.family.num_position_rows, -1),
        model.plan(layout, cache),
        cache,
        rows,
    )
    return model.forward(step)


def read_logits(model: DecoderModel, tokens: Tensor) -> Tensor:
    cache = model.new_cache(-(-len(tokens) // BLOCK_SIZE), BLOCK_SIZE)
    logits = run_step(model, cache, tokens[None], 0, torch.arange(len(tokens)))
    return logits.float().log_softmax(-1)


def compare(base: LoadedModel, other: LoadedModel, windows: list[Tensor]) -> tuple[float, ...]:
    """Return top-1 agreement, mean KL divergence and the ratio of perplexities."""
    same, divergence, surprise, num_tokens = 0.0, 0.0, 0.0, 0
    for tokens in windows:
        full, rounded = (read_logits(each.model, tokens)[:-1] for each in (base, other))
        same += float((full.argmax(-1) == rounded.argmax(-1)).sum())
        divergence += float((full.exp() * (full - rounded)).sum())
        following = tokens[1:, None]
        surprise += float((full.gather(1, following) - rounded.gather(1, following)).sum())
        num_tokens += len(following)
    ratio = torch.tensor(surprise / num_tokens).exp()
    return same / num_tokens, divergence / num_tokens, float(ratio)


def decode(model: DecoderModel, num_streams: int) -> float:
    """Return the seconds of a decode step of `num_streams` sequences."""
    length = 128
    num_blocks = -(-(length + NUM_DECODED) // BLOCK_SIZE)
    cache = model.new_cache(num_blocks * num_streams, BLOCK_SIZE)
    token, rows = torch.ones(num_streams, 1, dtype=torch.int64), torch.arange(num_streams)
    start_s = time.perf_counter()
    for position in range(length, length + NUM_DECODED):
        run_step(model, cache, token, position, rows)
    return (time.perf_counter() - start_s) / NUM_DECODED


def prefill(model: DecoderModel, window: Tensor) -> float:
    cache = model.new_cache(-(-len(window) // BLOCK_SIZE), BLOCK_SIZE)
    start_s = time.perf_counter()
    run_step(model, cache, window[None], 0, torch.tensor([len(window) - 1]))
    return time.perf_counter() - start_s


def time_in_turns(
    loaded: list[LoadedModel], num_tokens: int, run: Callable[[DecoderModel], float]
) -> list[str]:
    """Return the tokens per second of each model, and their ratio to the first one's.

    `run` returns the seconds that `num_tokens` take.
    """
    turns = [[run(each.model) for each in loaded] for _ in range(NUM_REPEATS)]
    best = [min(times) for times in zip(*turns, strict=True)]
    return [f"{num_tokens / seconds:,.1f} ({best[0] / seconds:.2f})" for seconds in best]


def count_weight_bytes(model: DecoderModel) -> int:
    """Return the memory of the weights of a model, without a vision tower."""
    whole: Any = model.family.model
    num_bytes: int = sum(t.nbytes for t in (*whole.parameters(), *whole.buffers()))
    return num_bytes + (model.weights.num_bytes if isinstance(model, NativeModel) else 0)


def measure_peak(folder: Path, variant: Variant) -> int:
    command = [sys.executable, "-m", "ops.bench.int8", str(folder), "--only", variant.name]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def read_windows(folder: Path, files: list[Path]) -> list[Tensor]:
    texts = [file.read_text() for file in files] or [*PASSAGES, *_read_documents()]
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    token_ids = [tokenizer.encode(text, add_special_tokens=False).ids for text in texts]
    return [torch.tensor(ids[:WINDOW]) for ids in token_ids if len(ids) > 1]


def _read_documents() -> list[str]:
    return [part for file in sorted(DOCUMENTS.glob("*.md")) for part in _parts(file.read_text())]


def _parts(text: str) -> list[str]:
    return [part for part in text.split("\n## ") if len(part) > WINDOW]


def report(folder: Path, files: list[Path]) -> None:
    """Print the tables of a model in a folder next to `INT4_FOLDER`."""
    windows = read_windows(folder, files)
    base = BASE.load(folder)
    loaded = [variant.load(folder) for variant in VARIANTS]
    names = [variant.name for variant in VARIANTS]
    accuracy = []
    for name, each in zip(names, loaded, strict=True):
        same, divergence, ratio = compare(base, each, windows)
        accuracy.append((name, f"{100 * same:.1f} %", f"{divergence:.5f}", f"{ratio:.4f}"))
    title = f"{len(windows)} texts, {sum(map(len, windows))} tokens"
    print_table(title, ("weights", "same top-1", "mean KL", "perplexity ratio"), accuracy)
    cells = [time_in_turns(loaded, n, partial(decode, num_streams=n)) for n in NUM_STREAMS]
    window = torch.ones(512, dtype=torch.int64)
    cells.append(time_in_turns(loaded, len(window), partial(prefill, window=window)))
    cells.append([f"{count_weight_bytes(each.model) / 1e6:,.0f}" for each in loaded])
    cells.append([f"{measure_peak(folder, variant) / 1e6:,.0f}" for variant in VARIANTS])
    decodes = (f"decode, {n} at once" for n in NUM_STREAMS)
    columns = ("weights", *decodes, "prefill", "weights MB", "peak MB")
    print_table("tokens per second, and memory", columns, zip(names, *cells, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="folder of the model")
    parser.add_argument("--text", type=Path, nargs="*", default=[], help="files to read")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only is None:
        with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as name:
            folder = Path(name) / "model"
            folder.symlink_to(options.model.absolute())
            write_int4(options.model, Path(name) / INT4_FOLDER)
            report(folder, options.text)
        return
    (variant,) = (variant for variant in VARIANTS if variant.name == options.only)
    with contextlib.redirect_stdout(sys.stderr):
        variant.load(options.model)
    sys.stdout.write(f"{peak_bytes(os.getpid())}\n")


if __name__ == "__main__":
    main()
