"""Sizes of the KV caches of a model's engines, before they start."""

import sys
from pathlib import Path

from rich.filesize import decimal

from shared.config.gpu_memory import memory_bytes
from shared.config.kv_cache import (
    MemoryUse,
    block_size_of,
    configured_bytes,
    count_blocks,
    measures_cache,
    plan_blocks,
)
from shared.config.schema import Config, EngineConfig, ModelConfig
from shared.errors import ConfigError, Unavailable
from shared.gpu.devices import find_gpus
from shared.gpu.nvml import read_gpus
from shared.models.dtypes import choose_dtype
from shared.stage.graphs import TALKER
from shared.stage.pipelines import ENGINE
from workers.cli.models.memory import ITEM_BYTES
from workers.cli.models.reports import Report
from workers.cli.models.stage_weights import count_rank_weights, count_weights


def describe_caches(
    config: Config, name: str, section: str, engine: EngineConfig, report: Report
) -> list[str]:
    """Return a line about the KV cache of the engines that load the folder of a model.

    `engine` are their settings, and `section` is the key of these settings: `engine`, or a pool. A
    model with a talker has a second line. Raises ConfigError, with settings that would fit, if one
    sequence of the maximum length does not fit into the cache.
    """
    model = config.models[name]
    lines: list[str] = []
    if report.kv_values_per_token == 0:
        return lines
    # With pools, `engine` has the settings of other stages.
    if section != ENGINE or not model.pools:
        try:
            size = _describe(model, engine, report)
        except ConfigError as error:
            if section == ENGINE:
                raise ConfigError(f"models.{name}: {error.message}", field=error.field) from error
            texts = error.message, error.field or ""
            message, field = (text.replace(f"{ENGINE}.", f"{section}.") for text in texts)
            raise ConfigError(message, field=field) from error
        place = section if section == ENGINE else f"pool {section.rpartition('.')[2]}"
        lines.append(f"KV cache of models.{name} ({place}): {size}")
    if report.talker is not None:
        # The cache of a talker is never measured.
        num_bytes = configured_bytes(config.engine)
        dtype = choose_dtype(model.dtype, report.dtype, config.engine.device)
        num_tokens = num_bytes // (report.talker.kv_values_per_token * ITEM_BYTES[dtype])
        lines.append(f"KV cache of models.{name} ({TALKER}): {_words(num_bytes, num_tokens)}")
    return lines


def _describe(model: ModelConfig, engine: EngineConfig, report: Report) -> str:
    folder = Path(model.path)
    dtype = choose_dtype(model.dtype, report.dtype, engine.device)
    block_size = block_size_of(engine)
    # The C++ kernels round the size of a head up, so a real block may be larger.
    block_bytes = report.kv_values_per_token * ITEM_BYTES[dtype] * block_size
    longest = report.max_position_embeddings
    max_model_len = min(longest, model.max_model_len or longest)
    ranks = f" in each of {engine.tensor_parallel} ranks" if engine.tensor_parallel > 1 else ""
    if not measures_cache(engine) or report.attends_items:
        num_blocks = count_blocks(engine, block_bytes, block_size, max_model_len)
        num_bytes = num_blocks * block_bytes if engine.num_blocks else configured_bytes(engine)
        return _words(num_bytes, num_blocks * block_size) + ranks
    memory = _memory_of(engine)
    if memory is None:
        return (
            f"the part of {engine.gpu_memory} of the GPU that the weights and the largest step"
            f" leave, as measured at the start{ranks}"
        )
    if report.divided:
        weights = count_rank_weights(folder, report, engine.tensor_parallel)[0]
    else:
        weights = count_weights(folder, report, tower=model.engine_has_tower)[ENGINE]
    use = MemoryUse(*memory, weights.num_bytes(dtype), graphs=0, step=0)
    num_blocks = plan_blocks(use, block_bytes, block_size, max_model_len)
    words = _words(num_blocks * block_bytes, num_blocks * block_size)
    return f"at most {words}{ranks}, less what the largest step takes, as measured at the start"


def _words(num_bytes: int, num_tokens: int) -> str:
    return f"{decimal(num_bytes)}, {num_tokens} tokens"


def _memory_of(engine: EngineConfig) -> tuple[int, int] | None:
    """Return the bytes of `gpu_memory` and of the whole device, for the smallest device.

    Returns None if `gpu_memory` is a share, and no device can be read.
    """
    try:
        gpus = find_gpus(engine.devices, read_gpus(), "devices")
        total = min(gpu.total_bytes for gpu in gpus)
    except (ConfigError, Unavailable, ValueError):
        if not isinstance(engine.gpu_memory, str):
            return None
        total = sys.maxsize
    return memory_bytes(engine.gpu_memory, total), total
