"""A folder in Hugging Face format becomes a model that is ready to run, or a ConfigError."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import structlog
import torch
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig

from shared.config import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models import registry
from shared.models.language import LanguageAdapter
from shared.models.tower import Tower, load_tower
from shared.vision.weights import load_weights
from workers.engine.cpu.decoder import NativeModel, why_not
from workers.engine.model.flat_model import DecoderModel, FlatModel
from workers.engine.model.lora import Adapters, load_adapters
from workers.engine.model.support import check_supported


@dataclass(frozen=True, slots=True)
class LoadedModel:
    model: DecoderModel
    tower: Tower | None
    """None for a model that does not see, and where encoders do it."""
    tokenizer: Any
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    adapters: Adapters

    def encode(self, text: str) -> list[int]:
        token_ids: list[int] = self.tokenizer.encode(text)
        return token_ids

    def encode_part(self, text: str) -> list[int]:
        """Without special tokens at its ends."""
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def load(model: ModelConfig, engine: EngineConfig) -> LoadedModel:
    """`model.path` as it is given; whoever read the configuration has resolved it.

    Raises ConfigError, also for whatever transformers makes of a folder that it cannot use: its
    errors are of every kind.
    """
    try:
        return _load(model, engine)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(
            f"models.path: {model.path} cannot be served: {error}", field="models.path"
        ) from error


def _load(model: ModelConfig, engine: EngineConfig) -> LoadedModel:
    folder = Path(model.path)
    _check_files(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    text_config = config.get_text_config(decoder=True)
    check_supported(config, folder)
    max_model_len = _max_model_len(text_config, model)
    dtype = getattr(torch, model.dtype)
    block_size = _block_size(engine)
    family = _load_weights(folder, config, dtype, engine.device)
    adapters = load_adapters(family, model.adapters)
    decoder = _make_model(family, engine, block_size, max_model_len, adapted=bool(adapters))
    num_blocks = _num_blocks(decoder, block_size, max_model_len, engine)
    warm_up(decoder, block_size)
    return LoadedModel(
        model=decoder,
        tower=load_tower(folder, dtype, engine.device) if _needs_tower(config, model) else None,
        tokenizer=AutoTokenizer.from_pretrained(folder, local_files_only=True),
        eos_token_ids=_eos_token_ids(folder, text_config),
        max_model_len=max_model_len,
        vocab_size=decoder.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        adapters=adapters,
    )


@torch.inference_mode()
def warm_up(model: DecoderModel, block_size: int) -> None:
    """A prefill of three tokens and a decode; a model that our attention cannot serve raises."""
    num_blocks = -(-4 // block_size)
    kv_cache = model.new_cache(num_blocks, block_size)
    for num_tokens, seq_len in ((3, 3), (1, 4)):
        plan = model.plan([range(num_blocks)], [0, num_tokens], [seq_len], kv_cache)
        positions = torch.arange(seq_len - num_tokens, seq_len, device=model.device)
        model.forward(
            model.embed(torch.zeros_like(positions)),
            positions.expand(model.family.num_position_rows, -1),
            plan,
            kv_cache,
            torch.tensor([num_tokens - 1], device=model.device),
        )


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"models.path: there is no folder {folder}", field="models.path")
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise ConfigError(f"models.path: {folder} has no {pattern}", field="models.path")


def _load_weights(
    folder: Path, config: PreTrainedConfig, dtype: torch.dtype, device: str
) -> LanguageAdapter:
    """The language model alone."""
    tower = registry.find_tower(config)
    without = () if tower is None else tower.modules
    model_class = registry.find_model_class(config)
    return registry.adapt(load_weights(model_class, folder, dtype, device, without))


def _make_model(
    family: LanguageAdapter,
    engine: EngineConfig,
    block_size: int,
    max_model_len: int,
    adapted: bool,
) -> DecoderModel:
    """On the kernels of its device where there are any for it, else on torch."""
    # Adapters hang on modules of transformers, which kernels go past.
    if torch.device(engine.device).type == "cuda":
        return _make_gpu_model(family, engine, max_model_len, adapted)
    if not engine.native or adapted:
        return FlatModel(family)
    reason = why_not(family, block_size)
    if reason is None:
        return NativeModel(family, torch.get_num_threads())
    structlog.get_logger().info("runs_on_torch", reason=reason)
    return FlatModel(family)


def _make_gpu_model(
    family: LanguageAdapter, engine: EngineConfig, max_model_len: int, adapted: bool
) -> DecoderModel:
    try:
        from workers.engine.cuda.model import GpuModel
    except ModuleNotFoundError as error:
        raise ConfigError(
            "engine.device: a GPU takes the extra `gpu`: pip install '.[gpu]' in a checkout",
            field="engine.device",
        ) from error
    return GpuModel(
        family, max_num_seqs=engine.max_num_seqs, max_model_len=max_model_len, adapted=adapted
    )


def _needs_tower(config: PreTrainedConfig, model: ModelConfig) -> bool:
    has_tower = registry.find_tower(config) is not None
    return has_tower and (model.tower == "engine" or model.local_tokens > 0)


def _max_model_len(text_config: PreTrainedConfig, model: ModelConfig) -> int:
    longest: int = text_config.max_position_embeddings
    return min(longest, model.max_model_len or longest)


def _block_size(engine: EngineConfig) -> int:
    """The last block of a sequence is half empty: of 32 at once, with prompts of 64 to 256 tokens
    and 64 more, 3.9 % of the slots in blocks of 16 and 1.8 % in blocks of 8, which are not slower
    on a CPU; a GPU's kernels load 16 at a time."""
    return engine.block_size or (8 if torch.device(engine.device).type == "cpu" else 16)


def _num_blocks(
    model: DecoderModel, block_size: int, max_model_len: int, engine: EngineConfig
) -> int:
    # Of a cache as it is, for kernels round sizes up.
    layers = model.new_cache(1, block_size)
    block_bytes = sum(tensor.nbytes for layer in layers for tensor in layer)
    num_blocks = engine.num_blocks or engine.kv_cache_mib * 2**20 // block_bytes
    needed = -(-max_model_len // block_size)
    if num_blocks < needed:
        key = "engine.num_blocks" if engine.num_blocks else "engine.kv_cache_mib"
        raise ConfigError(
            f"{key}: the pool has {num_blocks} KV blocks, one sequence of max_model_len"
            f" {max_model_len} takes {needed}; set engine.kv_cache_mib to"
            f" {-(-needed * block_bytes // 2**20)} or more (or engine.num_blocks to {needed}),"
            " or lower the model's max_model_len",
            field=key,
        )
    return num_blocks


def _eos_token_ids(folder: Path, text_config: PreTrainedConfig) -> frozenset[int]:
    """From generation_config.json, which knows all of them; else from the model's own config."""
    if (folder / "generation_config.json").is_file():
        ids = GenerationConfig.from_pretrained(folder, local_files_only=True).eos_token_id
    else:
        ids = text_config.eos_token_id
    return frozenset([ids] if isinstance(ids, int) else ids or [])
