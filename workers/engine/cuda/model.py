"""Decoder on a GPU: transformers' modules with Triton kernels, and decodes as CUDA graphs."""

from collections.abc import Callable
from typing import Any

import structlog
import torch
from torch import Tensor

from shared.errors import first_sentence
from shared.models.language import LanguageAdapter
from workers.engine.cuda.cuda_graphs import (
    CudaRecorder,
    DecodeGraphs,
    GraphBuffers,
    Replay,
    bucket_sizes,
)
from workers.engine.cuda.frame_codes import sample_on_device
from workers.engine.cuda.fused_layers import ATTENTION, fuse_layers
from workers.engine.cuda.kernels.plan import BlockTables, KernelPlan, plan_for_kernels
from workers.engine.cuda.kernels.tiling import Tiling
from workers.engine.model.attention import KVCache
from workers.engine.model.flat_model import BatchLayout, FlatModel, StepInputs
from workers.engine.model.support import kv_shapes


class GpuModel(FlatModel):
    """A decoder that runs on a GPU, with the cache layout of `FlatModel`."""

    kv_packing = "triton"

    def __init__(
        self,
        family: LanguageAdapter,
        *,
        max_num_seqs: int,
        max_model_len: int,
        adapted: bool = False,
        record: Callable[[Replay], Replay] | None = None,
    ) -> None:
        """`record` is passed to `DecodeGraphs`; by default it records CUDA graphs on CUDA only.

        With adapters, layers are not fused and graphs are not recorded: adapters wrap transformers'
        modules and change with the batch. Recurrent layers are wrapped in the same way.
        """
        super().__init__(family)
        sample_on_device(self)
        family.decoder.set_attn_implementation(ATTENTION)
        self._adapted = adapted or self.keeps_states
        self.is_fused = not self._adapted and fuse_layers(family.decoder, family.num_position_rows)
        self._num_rows = bucket_sizes(max_num_seqs)[-1]
        self._max_model_len = max_model_len
        self._record = record
        self._tables = BlockTables()
        self._graphs: DecodeGraphs | None = None
        config = family.decoder_config
        shapes = [shape for shape in kv_shapes(config) if shape.num_kv_heads]
        self._tiling = Tiling.of(config.num_attention_heads, shapes, self.dtype, self._windows)

    def plan(self, batch: BatchLayout, kv_cache: KVCache) -> Any:
        """Return the plan for the kernels, or for torch if a chunk has a span."""
        if any(batch.spans):
            return super().plan(batch, kv_cache)
        return plan_for_kernels(
            batch.block_tables,
            batch.query_start_loc,
            batch.seq_lens,
            block_size=kv_cache[0][0].shape[1],
            tiling=self._tiling,
            device=self.device,
            tables=self._tables,
        )

    @torch.inference_mode()
    def capture(self, kv_cache: KVCache) -> None:
        """Record the graphs of decode steps over `kv_cache`.

        Nothing is recorded for a model with wrapped modules, or with layers that use the ids of
        tokens. If a recording fails, all steps run without graphs. Raises the error of a device
        that is lost.
        """
        if self._adapted or self.family.uses_token_ids:
            return
        # Graphs over an earlier cache would keep its memory.
        self._graphs = None
        record = self._record
        if record is None:
            if self.device.type != "cuda":
                return
            record = CudaRecorder()
        try:
            self._graphs = self._record_decodes(kv_cache, record)
        except Exception as error:
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            structlog.get_logger().warning(
                "graphs_not_recorded", reason=first_sentence(error), exc_info=True
            )

    def _record_decodes(
        self, kv_cache: KVCache, record: Callable[[Replay], Replay]
    ) -> DecodeGraphs:
        config = self.family.decoder.config
        buffers = GraphBuffers.allocate(
            self._num_rows,
            -(-self._max_model_len // kv_cache[0][0].shape[1]),
            self.family.num_position_rows,
            config.hidden_size,
            self.dtype,
            self.device,
            self._tiling,
            getattr(torch, self.family.position_type),
        )
        rows = torch.arange(self._num_rows, device=self.device)
        run = super().forward

        def forward(embeddings: Tensor, positions: Tensor, plan: KernelPlan) -> Tensor:
            sampled = rows[: len(embeddings)]
            return run(StepInputs(embeddings, positions, plan, kv_cache, sampled))

        return DecodeGraphs(forward, buffers, record)

    def forward(self, step: StepInputs) -> Tensor:
        """Run one step, as a graph if possible. After `capture`, only its cache may be used."""
        graphs, logits = self._graphs, None
        is_graph = isinstance(step.plan, KernelPlan) and step.deepstack is None
        if graphs is not None and is_graph and step.hidden is None:
            logits = graphs.run(step.embeddings, step.positions, step.plan)
        if graphs is None or logits is None:
            self.num_eager_steps += 1
            return super().forward(step)
        self.num_graph_steps += 1
        self.num_graph_rows += len(logits)
        self.num_padding_rows += graphs.num_padded
        return logits.index_select(0, step.sampled_rows)
