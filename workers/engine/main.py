"""Entry point of the engine process: loads the model and starts the worker."""

import asyncio
import dataclasses
import gc
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import structlog
import torch
from llguidance.hf import from_tokenizer
from msgspec.structs import replace

from shared.blobs.store import Blobs
from shared.codec.tensors import to_torch
from shared.config.schema import EngineConfig, ModelConfig, SpeculativeConfig
from shared.errors import ConfigError, UnsupportedContent
from shared.gpu.meter import measure_gpu
from shared.protocol.pipeline import CODES, StageSpec
from shared.stage.runtime import Context
from shared.telemetry.metrics import Metrics
from shared.vision.embedding_store import EmbeddingStore
from shared.vision.weights_progress import WeightsProgress
from workers.engine.code_lead import CodeLead
from workers.engine.code_output import stage_output
from workers.engine.core.block_pool import BlockPool
from workers.engine.core.engine import EngineCore
from workers.engine.core.kv_events import KVEvents
from workers.engine.core.ngram_drafter import NgramDrafter
from workers.engine.core.sequence import EngineRequest, TokenMask
from workers.engine.core.step_cost import PrefillLimit
from workers.engine.cuda.cache_plan import plan_blocks
from workers.engine.cuda.profiling import ClaimedMemory, Profile, measure_steps
from workers.engine.item_encoder import ItemEncoder, OnEncoded
from workers.engine.item_loader import ItemLoader
from workers.engine.kv_transfer import KVLayout, KVReader
from workers.engine.loader import PACKING, READING, LoadedModel, count_block_bytes, load
from workers.engine.model.flat_model import DecoderModel
from workers.engine.runner import ModelRunner
from workers.engine.sampling.grammar import GrammarCompiler
from workers.engine.sampling.token_rules import CodesMask, RulesMask
from workers.engine.stage_output import StageOutput
from workers.engine.worker import EngineWorker


@dataclass(frozen=True, slots=True)
class Built:
    """Parts of an engine, for the worker of a role that runs one."""

    model: str
    loaded: LoadedModel
    core: EngineCore
    items: ItemLoader
    blobs: Blobs
    layout: KVLayout | None
    """None if the model's pipeline has no prefill workers."""
    encoder: ItemEncoder | None = None
    """Encodes items next to the steps, if the engine has a tower thread."""


async def main(context: Context) -> None:
    built = await build(context, has_tower_thread=True)
    output = _output_of(context, built)
    grammars = None
    if output.is_answer:
        context.log_sandbox()
        # Before the worker serves requests: this holds the GIL, for a second with 150,000 tokens.
        context.step("building the grammar compiler")
        grammars = new_grammar_compiler(built.loaded, context.config.engine.max_num_seqs)
    kv = None
    if built.layout is not None:
        kv = KVReader(built.blobs, built.layout, built.core.kv_exchange)
    lead = _lead_of(context, built.model)
    worker = EngineWorker(
        context, built.model, built.core, built.items, grammars, kv, output, lead, built.encoder
    )
    # The loaded objects live as long as the process. A full collection would visit all of them and
    # block the step thread and the log writer.
    gc.collect()
    gc.freeze()
    await worker.serve()


async def build(
    context: Context, reads_last: bool = True, *, has_tower_thread: bool = False
) -> Built:
    """Load the model that the worker serves; for `reads_last` see `ItemLoader`.

    Without `has_tower_thread`, steps encode all items.
    """
    config, name = context.config, context.model
    if name is None:
        raise ConfigError("an engine serves one model: name it with --model", field="model")
    if config.engine.threads:
        torch.set_num_threads(config.engine.threads)
    model = _model_of(context, name)
    blobs = await context.open_blobs()
    embeddings = None
    if model.tower == "encoder":
        embeddings = EmbeddingStore(context.bus, blobs, config, name, "consumer")
    elif model.share_embeddings:
        embeddings = EmbeddingStore(context.bus, blobs, config, name, "both")
    measure = WeightsProgress(Path(model.path)).measure

    def set_step(step: str) -> None:
        context.step(step, measure if step in (READING, PACKING) else None)

    memory = await asyncio.to_thread(ClaimedMemory.claim, config.engine)
    measure_gpu(config.engine, context.metrics.of(name))
    set_step("loading the model")
    stage = _stage_of(context, name)
    speaks = stage is not None and stage.output is not None and stage.output.kind == CODES
    loaded = await asyncio.to_thread(load, model, config.engine, set_step, speaks=speaks)
    attended = loaded.model.family.attends_items
    items = ItemLoader(blobs, embeddings, to_torch, reads_last, attended)
    context.step("building the engine")
    is_own = speaks or model is not config.models[name]
    # Routers that read KV events look for prompts of the model itself.
    engine = replace(config.engine, kv_events=False) if is_own else config.engine
    if loaded.num_blocks == 0 and memory is not None:
        context.step("measuring the memory of steps")
        loaded = await asyncio.to_thread(size_cache, loaded, engine, memory)
    encoder = _new_encoder(loaded, engine, items) if has_tower_thread else None
    core = await asyncio.to_thread(build_core, loaded, engine, items.share, encoder)
    _register_metrics(context.metrics.of(name), config.engine, loaded.model)
    layout = None
    if not is_own and any(edge.mode == "detour" for edge in context.pipelines[name].edges):
        context.step("hashing the model's files")
        layout = await asyncio.to_thread(KVLayout.of, model, core.kv_exchange.layout)
    return Built(name, loaded, core, items, blobs, layout, encoder)


def _register_metrics(metrics: Metrics, engine: EngineConfig, decoder: DecoderModel) -> None:
    metrics.set_function("num_ranks", lambda: engine.tensor_parallel)
    if decoder.device.type == "cuda":
        metrics.set_function("gpu_steps_total", lambda: decoder.num_graph_steps, kind="graph")
        metrics.set_function("gpu_steps_total", lambda: decoder.num_eager_steps, kind="eager")


def _output_of(context: Context, built: Built) -> StageOutput:
    key = f"models.{built.model}.stages.{context.stage.name}"
    chunks = context.pipelines[built.model].chunks_behind(context.stage.name)
    stage = _stage_of(context, built.model)
    return stage_output(context.bus, stage, built.loaded, key, [*chunks.values()])


def _lead_of(context: Context, model: str) -> CodeLead:
    stage, pipeline = _stage_of(context, model), context.pipelines[model]
    if stage is None or stage.output is None or stage.output.kind != CODES:
        return CodeLead()
    return CodeLead(pipeline.chunks_behind(stage.name))


def _stage_of(context: Context, model: str) -> StageSpec | None:
    return context.pipelines[model].stage(context.stage.name)


def _model_of(context: Context, name: str) -> ModelConfig:
    """Return the model to load: the stage's separate model, or the configured model."""
    model, stage = context.config.models[name], _stage_of(context, name)
    if stage is None or stage.path is None:
        return model
    return ModelConfig(stage.path, dtype=model.dtype)


def new_grammar_compiler(loaded: LoadedModel, max_held: int) -> GrammarCompiler | None:
    """Return None if the model has no end token or llguidance does not support its tokenizer."""
    try:
        tokenizer = from_tokenizer(
            loaded.tokenizer,
            # A model may have more logits than tokens, or fewer.
            max(loaded.vocab_size, len(loaded.tokenizer)),
            sorted(loaded.eos_token_ids),
        )
    except ValueError as error:
        structlog.get_logger().info("grammars_unsupported", reason=str(error))
        return None
    return GrammarCompiler(tokenizer, max_held)


def size_cache(loaded: LoadedModel, engine: EngineConfig, memory: ClaimedMemory) -> LoadedModel:
    """Return the model with the KV cache that its largest steps leave room for in each rank.

    Raises ConfigError if a sequence of the maximum length does not fit.
    """
    profile = Profile.of(engine, loaded.block_size, loaded.max_model_len)
    small = dataclasses.replace(
        loaded, num_blocks=profile.num_blocks, max_model_len=profile.max_model_len
    )
    plain = replace(engine, kv_events=False)
    uses = measure_steps(
        [memory, *loaded.rank_memories], partial(build_core, small, plain), profile
    )
    # All ranks have the same blocks, with a part of the heads each.
    use = min(uses, key=lambda use: use.cache)
    block_bytes = count_block_bytes(loaded.model, loaded.block_size)
    num_blocks = plan_blocks(use, block_bytes, loaded.block_size, loaded.max_model_len)
    structlog.get_logger().info("kv_cache_sized", num_blocks=num_blocks, plan=str(use))
    return dataclasses.replace(loaded, num_blocks=num_blocks)


def build_core(
    loaded: LoadedModel,
    engine: EngineConfig,
    on_encoded: OnEncoded | None = None,
    encoder: ItemEncoder | None = None,
) -> EngineCore:
    """Return an engine core for the loaded model; for the other arguments see `ModelRunner`."""
    max_num_seqs = engine.max_num_seqs
    if loaded.num_item_slots is not None:
        max_num_seqs = min(max_num_seqs, loaded.num_item_slots)
    runner = ModelRunner(
        loaded.model,
        loaded.num_blocks,
        loaded.block_size,
        loaded.tower,
        engine.embedding_cache_mib * 2**20,
        on_encoded,
        loaded.adapters,
        max_num_seqs,
        encoder,
    )
    return EngineCore(
        runner,
        loaded.decode,
        loaded.eos_token_ids,
        pool=BlockPool(
            loaded.num_blocks, loaded.block_size, events=KVEvents() if engine.kv_events else None
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        max_model_len=loaded.max_model_len,
        vocab_size=loaded.vocab_size,
        prefix_caching=engine.prefix_caching and loaded.model.family.shares_prefixes,
        encode=loaded.encode_part,
        new_drafter=lambda: _new_drafter(engine.speculative),
        max_drafting_tokens=engine.speculative.max_step_tokens,
        prefill_limit=PrefillLimit(
            math.inf if engine.max_step_ms is None else engine.max_step_ms / 1000,
            engine.min_prompt_share,
        ),
        interactive_slowdown=engine.interactive_slowdown,
        pooling=loaded.pooling,
        kv_memory=runner,
        keeps_states=loaded.model.keeps_states,
        runs_ahead=_runs_ahead(loaded, engine),
        new_rules=partial(_new_rules, loaded),
    )


def _new_encoder(
    loaded: LoadedModel, engine: EngineConfig, items: ItemLoader
) -> ItemEncoder | None:
    is_wanted = engine.tower_thread
    if is_wanted is None:
        is_wanted = loaded.model.device.type == "cuda"
    if loaded.tower is None or not is_wanted:
        return None
    return ItemEncoder(loaded.tower, engine.tower_batch_tokens, items.share)


def _runs_ahead(loaded: LoadedModel, engine: EngineConfig) -> bool:
    if loaded.model.keeps_states:
        return False
    if engine.steps_ahead is None:
        return loaded.model.device.type == "cuda"
    return engine.steps_ahead == 1


def _new_rules(loaded: LoadedModel, request: EngineRequest) -> TokenMask | None:
    codes = loaded.codes
    if codes is not None and codes.num_places > 1:
        return CodesMask(codes, loaded.eos_token_ids, loaded.vocab_size)
    rules = loaded.model.family.rules_of(request)
    if rules is not None and request.new_token_mask is not None:
        raise UnsupportedContent(
            "this model has rules for its tokens, with which structured outputs are not supported",
            field="sampling_params.structured_outputs",
        )
    return None if rules is None else RulesMask(rules, loaded.vocab_size)


def _new_drafter(config: SpeculativeConfig) -> NgramDrafter | None:
    if config.num_tokens == 0:
        return None
    return NgramDrafter(config.num_tokens, config.min_ngram, config.max_ngram)
