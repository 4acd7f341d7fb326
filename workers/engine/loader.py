"""Loads a model from a folder in Hugging Face format."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import structlog
import torch
from transformers import AutoConfig, PreTrainedConfig

from shared.config.kv_cache import block_size_of, configured_bytes, count_blocks, measures_cache
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError, first_sentence
from shared.helpers.device_errors import is_out_of_memory
from shared.helpers.heap import returning_freed_memory
from shared.models import registry
from shared.models.dtypes import choose_dtype, saved_dtype
from shared.models.language import LanguageAdapter
from shared.models.reach import count_positions
from shared.models.states import recurrent_layers
from shared.models.tower import Tower, load_tower
from shared.native import library
from shared.protocol.code_tokens import CodeTokens, find_code_tokens
from shared.stage.hybrids import check_settings
from shared.stage.ranks import check_rank_settings
from shared.stage.start_reports import SetStep, ignore_step
from shared.vision.rank_plan import Share, refuse
from shared.vision.weights import load_weights
from workers.engine.core.sequence import LAST_TOKEN, Pooling
from workers.engine.cpu.decoder import NativeModel, unsupported_reason
from workers.engine.cuda.profiling import ClaimedMemory
from workers.engine.end_tokens import check_endless, load_tokenizer, read_end_tokens
from workers.engine.model import talkers
from workers.engine.model.flat_model import BatchLayout, DecoderModel, FlatModel, StepInputs
from workers.engine.model.int8 import report_on
from workers.engine.model.item_attention import ItemAttention
from workers.engine.model.lora import Adapters, load_adapters
from workers.engine.model.quantizer import QuantizedConfig
from workers.engine.model.ranks import check_ranks
from workers.engine.model.self_check import check_against_whole
from workers.engine.model.support import check_supported, num_item_values
from workers.engine.model.talker import MediaParts, Talker
from workers.engine.parallel.followers import Followers, starting
from workers.engine.pooling_files import read_pooling

READING, PACKING = "reading weights", "packing weights"
COMPILING = "compiling kernels, once"


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to run, with its tokenizer and the size of its KV cache."""

    model: DecoderModel
    tower: Tower | None
    """Vision tower; None for text models, and where encoder workers run the tower."""
    tokenizer: Any
    eos_token_ids: frozenset[int]
    max_model_len: int
    vocab_size: int
    num_blocks: int
    """Number of KV blocks; 0 if it follows from the measured memory of a GPU."""
    block_size: int
    adapters: Adapters
    pooling: Pooling = LAST_TOKEN
    codes: CodeTokens | None = None
    """Tokens that are codes of a codec; None for a model that does not speak."""
    num_item_slots: int | None = None
    """Number of requests that have keys and values of their items for cross attention at the same
    time; None for a model without cross attention."""
    talker: Talker | None = None
    """The talker of an omni model; None for any other part or model."""
    rank_memories: Sequence[ClaimedMemory] = ()
    """Memory of the other ranks' GPUs."""

    def encode_part(self, text: str) -> list[int]:
        """Encode text without adding special tokens."""
        token_ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return token_ids

    def decode(self, token_ids: list[int], /, *, skip_special_tokens: bool = True) -> str:
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text


def load(
    model: ModelConfig,
    engine: EngineConfig,
    set_step: SetStep = ignore_step,
    *,
    speaks: bool = False,
) -> LoadedModel:
    """Load the model of the folder `model.path`, which the configuration has already resolved.

    If it `speaks` and has a talker, the talker is loaded instead of the part that writes text.
    `set_step` is called with the name of each step. Raises ConfigError. Errors of transformers are
    wrapped in it, because unusable folders make transformers raise exceptions of any type.
    """
    try:
        with returning_freed_memory():
            if speaks and (talker := talkers.find_talker(Path(model.path))) is not None:
                return _load_talker(talker, model, engine, set_step)
            return _load(model, engine, set_step, speaks)
    except ConfigError:
        raise
    except Exception as error:
        if is_out_of_memory(error) and engine.device == "cuda":
            raise ConfigError(
                f"engine.gpu_memory: the weights of {model.path} do not fit into"
                f" {engine.gpu_memory} of the device: raise it, set models.NAME.dtype to a smaller"
                " type, or divide the model by engine.tensor_parallel",
                field="engine.gpu_memory",
            ) from error
        raise ConfigError(
            f"models.path: {model.path} cannot be served: {first_sentence(error)}",
            field="models.path",
        ) from error


def load_rank(model: ModelConfig, engine: EngineConfig, share: Share) -> DecoderModel:
    """Load the part of a rank other than 0. Raises ConfigError."""
    try:
        with returning_freed_memory():
            config = AutoConfig.from_pretrained(model.path, local_files_only=True)
            family = _load_family(config, model, engine, share)
            return _build_decoder(family, engine, 1, 1, ignore_step, adapted=True)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"rank {share.rank}: {first_sentence(error)}") from error


def _load(model: ModelConfig, engine: EngineConfig, set_step: SetStep, speaks: bool) -> LoadedModel:
    folder = Path(model.path)
    _check_files(folder)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    check_supported(config, folder)
    check_rank_settings(model, engine)
    check_ranks(config, folder, engine.tensor_parallel)
    if recurrent_layers(config.get_text_config(decoder=True)):
        check_settings(model, engine)
    with starting(model, engine) as followers:
        return _load_with(followers, config, model, engine, set_step, speaks)


def _load_with(
    followers: Followers | None,
    config: PreTrainedConfig,
    model: ModelConfig,
    engine: EngineConfig,
    set_step: SetStep,
    speaks: bool,
) -> LoadedModel:
    folder, text_config = Path(model.path), config.get_text_config(decoder=True)
    pooling = read_pooling(folder, model.pooling)
    longest = count_positions(text_config)
    max_model_len = min(longest, model.max_model_len or longest)
    dtype = _choose_dtype(config, model, engine)
    block_size = block_size_of(engine)
    _begin_reading(text_config, model, engine, set_step)
    share = None if followers is None else Share(0, engine.tensor_parallel)
    family = _load_family(config, model, engine, share)
    needs_tower = family.tower is not None and model.engine_has_tower
    if followers is None:
        _check_generic(config, family, block_size, set_step)
    adapters = _load_adapters(family, model)
    with ThreadPoolExecutor(1) as executor:
        # Meanwhile the kernels copy the weights, without the GIL.
        loading = executor.submit(load_tokenizer, folder)
        is_adapted = bool(adapters) or followers is not None
        decoder = _build_decoder(
            family, engine, block_size, max_model_len, set_step, adapted=is_adapted
        )
        if followers is not None:
            set_step("waiting for the other ranks")
            decoder = followers.join(decoder)
    tokenizer = loading.result()
    codes = _codes_of(config, tokenizer, decoder.vocab_size) if speaks else None
    end_token_ids = _end_tokens_of(folder, tokenizer, decoder.vocab_size, codes)
    if not end_token_ids and model.pooling is None:
        check_endless(folder, tokenizer)
    num_item_slots, slots_bytes = _resolve_num_item_slots(config, dtype, engine)
    num_blocks = 0
    if not measures_cache(engine) or family.attends_items:
        block_bytes = count_block_bytes(decoder, block_size)
        num_blocks = count_blocks(engine, block_bytes, block_size, max_model_len, slots_bytes)
    set_step("warming up")
    warm_up(decoder, block_size)
    if needs_tower:
        set_step("loading the vision tower")
    return LoadedModel(
        model=decoder,
        tower=load_tower(folder, dtype, engine.device, engine.kernels) if needs_tower else None,
        tokenizer=tokenizer,
        eos_token_ids=end_token_ids,
        max_model_len=max_model_len,
        vocab_size=decoder.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        adapters=adapters,
        pooling=pooling,
        codes=codes,
        num_item_slots=num_item_slots,
        rank_memories=() if followers is None else followers.memories,
    )


def _load_family(
    config: PreTrainedConfig, model: ModelConfig, engine: EngineConfig, share: Share | None
) -> LanguageAdapter:
    """Load the language model without its tower, or a rank's share of it."""
    if share is not None and not engine.threads:
        torch.set_num_threads(max(1, torch.get_num_threads() // share.num_ranks))
    tower = registry.find_tower(config)
    keeps = _keeps_numbers(config.get_text_config(decoder=True), model, engine)
    weights = load_weights(
        registry.find_model_class(config),
        Path(model.path),
        _choose_dtype(config, model, engine),
        engine.device,
        () if tower is None else tower.modules,
        QuantizedConfig(rounds=model.quantization is not None, keeps=keeps),
        share=share,
    )
    report_on(weights)
    return registry.adapt(weights)


def _choose_dtype(config: Any, model: ModelConfig, engine: EngineConfig) -> torch.dtype:
    saved = saved_dtype(config)
    served = choose_dtype(model.dtype, saved, engine.device)
    if engine.device == "cuda" and served != saved:
        structlog.get_logger().info("dtype_chosen", dtype=served, saved=saved)
    dtype: torch.dtype = getattr(torch, served)
    return dtype


def _begin_reading(
    text_config: Any, model: ModelConfig, engine: EngineConfig, set_step: SetStep
) -> None:
    """Load the kernels, which the first start compiles, before the step that reads weights."""
    if engine.kernels != "torch":
        set_step(COMPILING)
        _keeps_numbers(text_config, model, engine)
    set_step(READING)


def _keeps_numbers(text_config: Any, model: ModelConfig, engine: EngineConfig) -> bool:
    """Return whether quantized weights are kept: the C++ kernels read them, and torch does not."""
    return (
        torch.device(engine.device).type == "cpu"
        and engine.kernels != "torch"
        and not model.adapters
        and "llama_like" in registry.find_decoder_traits(text_config)
        and library.load() is not None
    )


def _check_generic(
    config: PreTrainedConfig, family: LanguageAdapter, block_size: int, set_step: SetStep
) -> None:
    """Compare the answers of a generic family with transformers'. Raises ConfigError."""
    source = registry.find_source(config)
    if source == "native":
        return
    structlog.get_logger().info("generic_family", type=config.model_type, source=source)
    set_step("comparing answers with transformers")
    check_against_whole(FlatModel(family), block_size)


def _load_adapters(family: LanguageAdapter, model: ModelConfig) -> Adapters:
    if family.attends_items and model.adapters:
        raise ConfigError(
            "adapters: the model has cross attention, for which adapters are not supported; remove"
            " them",
            field="adapters",
        )
    return load_adapters(family, model.adapters)


def _load_talker(
    load_part: talkers.LoadTalker, model: ModelConfig, engine: EngineConfig, set_step: SetStep
) -> LoadedModel:
    if engine.tensor_parallel > 1:
        refuse("talkers are not supported")
    folder = Path(model.path)
    _check_files(folder)
    set_step(READING)
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    dtype = _choose_dtype(config, model, engine)
    talker = load_part(dtype, engine.device, _media_parts_of(model))
    longest: int = talker.decoder.config.max_position_embeddings
    max_model_len = min(longest, model.max_model_len or longest)
    block_size = block_size_of(engine)
    # The wrapped modules of a talker are neither fused nor recorded.
    decoder = _build_decoder(talker, engine, block_size, max_model_len, set_step, adapted=True)
    block_bytes = count_block_bytes(decoder, block_size)
    num_blocks = count_blocks(engine, block_bytes, block_size, max_model_len)
    set_step("warming up")
    warm_up(decoder, block_size)
    return LoadedModel(
        model=decoder,
        tower=None,
        tokenizer=load_tokenizer(folder),
        eos_token_ids=talker.end_token_ids,
        max_model_len=max_model_len,
        vocab_size=decoder.vocab_size,
        num_blocks=num_blocks,
        block_size=block_size,
        adapters=Adapters(),
        codes=CodeTokens(talker.codes.start, len(talker.codes)),
        talker=talker,
    )


def _media_parts_of(model: ModelConfig) -> MediaParts:
    """Return the parts of a thinker that its talker needs."""
    if not (model.max_images or model.max_videos or model.max_audios):
        return "none"
    return "tower" if model.engine_has_tower else "embeddings"


def _codes_of(config: PreTrainedConfig, tokenizer: Any, vocab_size: int) -> CodeTokens | None:
    return find_code_tokens(config.to_dict(), tokenizer.get_vocab().get, vocab_size)


def _end_tokens_of(
    folder: Path, tokenizer: Any, vocab_size: int, codes: CodeTokens | None
) -> frozenset[int]:
    if codes is not None and codes.end_token_ids:
        return codes.end_token_ids
    return read_end_tokens(folder, tokenizer, range(vocab_size), is_codec=codes is not None)


@torch.inference_mode()
def warm_up(model: DecoderModel, block_size: int) -> None:
    """Run a prefill of three tokens and a decode; raises if the paged attention lacks a feature."""
    num_blocks = -(-4 // block_size)
    kv_cache, states = model.new_cache(num_blocks, block_size), model.new_states(1)
    attention = ItemAttention(model.family, 1) if model.family.attends_items else None
    if attention is not None:
        width = model.family.decoder_config.hidden_size
        attention.add("", torch.zeros(1, width, dtype=model.dtype, device=model.device))
    for num_tokens, seq_len in ((3, 3), (1, 4)):
        layout = BatchLayout([[*range(num_blocks)]], [0, num_tokens], [seq_len])
        position_type = getattr(torch, model.family.position_type)
        positions = torch.arange(seq_len - num_tokens, seq_len, device=model.device)
        token_ids = torch.zeros_like(positions)
        step = StepInputs(
            model.embed(token_ids),
            positions.to(position_type).expand(model.family.num_position_rows, -1),
            model.plan(layout, kv_cache),
            kv_cache,
            torch.tensor([num_tokens - 1], device=model.device),
            token_ids=token_ids,
            states=states.step([0, num_tokens], [seq_len], [0]),
            attend_items=None if attention is None else attention.plan([""], [0, num_tokens]),
        )
        model.forward(step)


def _check_files(folder: Path) -> None:
    if not folder.is_dir():
        raise ConfigError(f"models.path: there is no folder {folder}", field="models.path")
    for pattern in ("config.json", "tokenizer.json", "*.safetensors"):
        if not any(folder.glob(pattern)):
            raise ConfigError(f"models.path: {folder} has no {pattern}", field="models.path")


def _build_decoder(
    family: LanguageAdapter,
    engine: EngineConfig,
    block_size: int,
    max_model_len: int,
    set_step: SetStep,
    adapted: bool,
) -> DecoderModel:
    """Return the model on the kernels of its device if they support it, else on torch."""
    is_cuda = torch.device(engine.device).type == "cuda"
    if family.attends_items:
        # The kernels of a GPU have no cross attention, and neither do CUDA graphs.
        flat = FlatModel(family)
        if is_cuda:
            _import_gpu().sample_on_device(flat)
        return flat
    # Adapters and ranks change modules of transformers, which the kernels bypass.
    if is_cuda:
        set_step("preparing the GPU")
        gpu_model: DecoderModel = _import_gpu().GpuModel(
            family, max_num_seqs=engine.max_num_seqs, max_model_len=max_model_len, adapted=adapted
        )
        return gpu_model
    if engine.kernels == "torch" or adapted:
        return FlatModel(family)
    set_step(COMPILING)
    reason = unsupported_reason(family, block_size)
    if reason is None:
        # The kernels copy the weights, which reads the rest of them from the disk.
        set_step(PACKING)
        return NativeModel(family, torch.get_num_threads(), engine.kernels)
    structlog.get_logger().info("runs_on_torch", reason=reason)
    return FlatModel(family)


def _import_gpu() -> ModuleType:
    """Return the package that needs Triton. Raises ConfigError."""
    try:
        from workers.engine.cuda import model
        from workers.engine.cuda.kernels.compilations import keep_kernels
    except ModuleNotFoundError as error:
        raise ConfigError(
            "engine.device: a GPU requires the extra `gpu`: pip install '.[gpu]' in a checkout",
            field="engine.device",
        ) from error
    keep_kernels()
    return model


def count_block_bytes(model: DecoderModel, block_size: int) -> int:
    """Return the size of a KV block: of a real one, because kernels round sizes up."""
    layers = model.new_cache(1, block_size)
    return sum(tensor.nbytes for layer in layers for tensor in layer)


def _resolve_num_item_slots(
    config: PreTrainedConfig, dtype: torch.dtype, engine: EngineConfig
) -> tuple[int | None, int]:
    """Return the number of slots for items, which have half of the cache, and their bytes."""
    slot_bytes = num_item_values(config) * dtype.itemsize
    if not slot_bytes:
        return None, 0
    num_slots = min(engine.max_num_seqs, configured_bytes(engine) // 2 // slot_bytes)
    if num_slots == 0:
        raise ConfigError(
            "engine.kv_cache_mib: the keys and values of a sound for cross attention do not fit"
            f" into half of it; set it to {-(-2 * slot_bytes // 2**20)} or more",
            field="engine.kv_cache_mib",
        )
    return num_slots, num_slots * slot_bytes
