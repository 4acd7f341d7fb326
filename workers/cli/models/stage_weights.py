"""Weights that the process of each stage of a model has in memory, from the files' headers."""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from shared.config.schema import EngineConfig
from shared.native import library
from shared.stage.graphs import CODE2WAV, TALKER
from shared.stage.pipelines import ENGINE
from shared.vision.quantized import read_kept_sizes, read_shapes
from workers.cli.models.memory import Weights
from workers.cli.models.reports import Report

# Names of weights: the matrices in a decoder's layers are its linear layers.
_IN_DECODER = re.compile(r"(^|\.)layers\.\d+\.")
_IN_TOWER = re.compile(r"(^|\.)(visual|vision_|audio_|encoder\.)")
_VOCODER = re.compile(r"(code2wav|token2wav)\.")
CODEC_FILES = ("model.safetensors", "pytorch_model.bin")
_LAYER = re.compile(r"thinker\.model\.(language_model\.)?layers\.(\d+)\.")
_HEAD = "thinker.lm_head."


def can_keep_numbers(engine: EngineConfig) -> bool:
    """Return whether engines on this machine have products for the numbers of a folder."""
    return engine.device == "cpu" and engine.kernels != "torch" and library.can_load()


def count_weights(
    folder: Path,
    report: Report,
    *,
    rounds: bool = False,
    keeps: bool = False,
    tower: bool = True,
) -> dict[str, Weights]:
    """Return the weights of each stage that loads weights of the folder. Raises ConfigError.

    `rounds` is whether `quantization: int8` is set. `keeps` is whether this machine has products
    for the numbers of quantized weights. Both apply to the decoder that writes the text. Without
    `tower`, the engine does not load the tower.
    """
    shapes = list(read_shapes(folder))
    bytes_by_name = read_kept_sizes(folder) if keeps and report.keeps_numbers else {}
    num_rounded = num_values = number_bytes = 0
    for name, shape in shapes:
        is_absent = not tower and _IN_TOWER.search(name) is not None
        if is_absent or ENGINE not in _stages_of(name, report):
            continue
        is_linear = _is_linear(name, shape)
        if is_linear and name in bytes_by_name:
            number_bytes += bytes_by_name[name]
        elif is_linear and rounds:
            num_rounded += math.prod(shape)
        else:
            num_values += math.prod(shape)
    weights = {ENGINE: Weights(num_values, num_rounded, number_bytes)}
    for stage in () if report.talker is None else (TALKER, CODE2WAV):
        used = (math.prod(shape) for name, shape in shapes if stage in _stages_of(name, report))
        weights[stage] = Weights(sum(used))
    return weights


def count_rank_weights(folder: Path, report: Report, num_ranks: int) -> tuple[Weights, Weights]:
    """Return the weights of rank 0 and of each other rank. Raises ConfigError.

    Rank 0 alone has the embeddings, the head and the tower.
    """
    divided = [_pattern_of(name) for name in report.divided]
    first = other = 0
    for name, shape in read_shapes(folder):
        num_values = math.prod(shape)
        is_outside = _IN_DECODER.search(name) is None and len(shape) > 1
        if is_outside or _IN_TOWER.search(name) is not None:
            first += num_values
            continue
        if any(pattern.search(name) for pattern in divided):
            num_values = -(-num_values // num_ranks)
        first, other = first + num_values, other + num_values
    return Weights(first), Weights(other)


def _pattern_of(layer: str) -> re.Pattern[str]:
    # Older files name the parts of experts in other ways.
    if "experts" in layer:
        return re.compile(r"\.experts\.")
    return re.compile(r"(^|\.)" + re.escape(layer).replace(r"\*", r"\d+") + r"\.weight$")


def count_codec(folder: Path) -> Weights:
    """Return the weights of a codec of Orpheus, which are in memory as they are in the file."""
    files = (folder / name for name in CODEC_FILES)
    file = next((file for file in files if file.is_file()), None)
    return Weights(codec_bytes=0 if file is None else file.stat().st_size)


def _is_linear(name: str, shape: list[int]) -> bool:
    in_decoder = _IN_DECODER.search(name) is not None and _IN_TOWER.search(name) is None
    return len(shape) == 2 and in_decoder


def _stages_of(name: str, report: Report) -> Iterator[str]:
    """Yield the stages whose processes load a weight."""
    if report.talker is None:
        yield ENGINE
    elif _VOCODER.match(name):
        yield CODE2WAV
    elif name.startswith("talker."):
        yield TALKER
    else:
        yield ENGINE
        layer = _LAYER.match(name)
        is_used = layer is None or int(layer[2]) < report.talker.num_thinker_layers
        if is_used and not name.startswith(_HEAD):
            yield TALKER
