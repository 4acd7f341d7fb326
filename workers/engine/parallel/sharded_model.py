"""A decoder of several ranks. Rank 0 has the runner, and the other ranks follow its commands."""

import os
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import msgspec
import structlog
import torch
from torch import Tensor

from workers.engine.cuda.profiling import DeviceMemory
from workers.engine.model.attention import KVCache
from workers.engine.model.flat_model import BatchLayout, DecoderModel, StepInputs
from workers.engine.parallel import messages
from workers.engine.parallel.messages import (
    Command,
    CopyBlocks,
    MemoryRead,
    NewCache,
    ReadMemory,
    Step,
    ZeroBlocks,
)
from workers.engine.parallel.process_group import ProcessGroup
from workers.engine.parallel.rank_watch import RankWatch

EMBEDDINGS, POSITIONS = "embeddings", "positions"
_log = structlog.get_logger()


class _Plan(NamedTuple):
    layout: BatchLayout
    own: Any


class ShardedModel(DecoderModel):
    """The decoder of rank 0, which has all ranks run each step."""

    def __init__(
        self, own: DecoderModel, group: ProcessGroup, followers: Sequence[BinaryIO]
    ) -> None:
        super().__init__(own.family)
        self.kv_packing = f"{own.kv_packing}, {group.share.num_ranks} ranks"
        self.draw = own.draw
        self._own = own
        self._group = group
        self._followers = followers
        self._is_warm = False
        group.sum_outputs(own.family.model)

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        self._send(NewCache(num_blocks, block_size))
        return self._own.new_cache(num_blocks, block_size)

    def copy_blocks(self, kv_cache: KVCache, copies: Sequence[tuple[int, int]]) -> None:
        self._send(CopyBlocks(copies))
        self._own.copy_blocks(kv_cache, copies)

    def zero_blocks(self, kv_cache: KVCache, blocks: Sequence[int]) -> None:
        self._send(ZeroBlocks(blocks))
        self._own.zero_blocks(kv_cache, blocks)

    def plan(self, batch: BatchLayout, kv_cache: KVCache) -> Any:
        return _Plan(batch, self._own.plan(batch, kv_cache))

    def forward(self, step: StepInputs) -> Tensor:
        """Run one step in all ranks. `step.kv_cache` must be the last cache.

        The process ends if a step fails: the other ranks may wait for the rest of it, so it cannot
        be repeated. An error of the first step, which warms up the model, is raised.
        """
        plan: _Plan = step.plan
        deepstack = step.deepstack
        try:
            num_levels = 0 if deepstack is None else len(deepstack)
            self._send(Step(*plan.layout, num_levels=num_levels))
            for tensor in (step.embeddings, step.positions, deepstack):
                if tensor is not None:
                    self._group.broadcast(tensor.contiguous())
            logits = self._own.forward(step._replace(plan=plan.own))
        except Exception:
            if not self._is_warm:
                raise
            _log.exception("rank_failed", rank=0)
            os._exit(1)
        self._is_warm = True
        self.num_eager_steps = self._own.num_eager_steps
        return logits

    def _send(self, command: Command) -> None:
        message = msgspec.msgpack.encode(command)
        for follower in self._followers:
            messages.send(follower, message)


class RankMemory:
    """The memory of another rank's GPU, which the rank reads after the commands before."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO, free: int, watch: RankWatch) -> None:
        self._commands = commands
        self._answers = answers
        self._free = free
        self._watch = watch

    def free(self) -> int:
        """Return the memory that was free before the rank was loaded."""
        return self._free

    def allocated(self) -> int:
        return self._read(peak=False)

    def peak(self) -> int:
        return self._read(peak=True)

    def _read(self, *, peak: bool) -> int:
        messages.send(self._commands, msgspec.msgpack.encode(ReadMemory(peak)))
        # This process ends together with the other one, so the answer comes.
        answer = messages.answers.decode(self._watch.receive(self._answers) or b"")
        assert isinstance(answer, MemoryRead)
        return answer.num_bytes


@torch.inference_mode()
def follow(
    model: DecoderModel,
    group: ProcessGroup,
    commands: BinaryIO,
    answers: BinaryIO,
    memory: DeviceMemory,
) -> None:
    """Run the steps of a rank until rank 0 ends."""
    group.sum_outputs(model.family.model)
    kv_cache: KVCache = []
    while (message := messages.receive(commands)) is not None:
        match messages.commands.decode(message):
            case NewCache(num_blocks, block_size):
                # The memory of the previous cache is free before.
                kv_cache = []
                kv_cache = model.new_cache(num_blocks, block_size)
            case CopyBlocks(copies):
                model.copy_blocks(kv_cache, copies)
            case ZeroBlocks(blocks):
                model.zero_blocks(kv_cache, blocks)
            case ReadMemory(peak):
                num_bytes = memory.peak() if peak else memory.allocated()
                messages.send(answers, msgspec.msgpack.encode(MemoryRead(num_bytes)))
            case Step() as step:
                _run(model, group, kv_cache, step)


def _run(model: DecoderModel, group: ProcessGroup, kv_cache: KVCache, step: Step) -> None:
    """Run a step without logits, which only rank 0 computes."""
    family, num_tokens = model.family, step.query_start_loc[-1]
    width = family.decoder_config.hidden_size

    def receive(*shape: int, dtype: torch.dtype = model.dtype) -> Tensor:
        tensor = torch.empty(shape, dtype=dtype, device=model.device)
        group.broadcast(tensor)
        return tensor

    layout = BatchLayout(step.block_tables, step.query_start_loc, step.seq_lens, step.spans)
    embeddings = receive(num_tokens, width)
    type_of_positions = getattr(torch, family.position_type)
    positions = receive(family.num_position_rows, num_tokens, dtype=type_of_positions)
    deepstack = receive(step.num_levels, num_tokens, width) if step.num_levels else None
    no_rows = torch.empty(0, dtype=torch.int64, device=model.device)
    plan = model.plan(layout, kv_cache)
    model.forward(StepInputs(embeddings, positions, plan, kv_cache, no_rows, deepstack))
