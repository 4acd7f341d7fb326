"""Self-check of generic families: the engine's logits against the logits of transformers.

A declared family has tests, but a generic one may depend on something that the engine does not do,
in a version or with a setting that no test has. Windows and scales that begin after more tokens are
not noticed, and neither are differences below the rounding of the model's dtype.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from shared.errors import ConfigError
from shared.models.language import LanguageAdapter
from shared.models.states import ATTENTION_KINDS, layer_kinds
from workers.engine.model.check_prompt import SEED, CheckPrompt, make_prompt
from workers.engine.model.flat_model import BatchLayout, FlatModel, StepInputs
from workers.engine.model.step_plan import Window
from workers.engine.model.support import kv_shapes, layer_windows

CHUNKS = (0, 12, 20, 21, 22, 23, 24)
"""Bounds of the engine's chunks: two of a prefill, and four decodes."""

# The difference may be this many times the noise, the effect of a change in the last bits of the
# embeddings. Both are relative to the spread of a row's logits. The tested types stay below 2.5
# times. The second limit is for models whose noise would hide any difference.
MAX_NOISE, MAX_DIFFERENCE = 4, 0.5

_RECORDER = "pagemill_recorder"


@torch.inference_mode()
def check_against_whole(model: FlatModel, block_size: int) -> None:
    """Raise ConfigError if the engine computes other logits than transformers' whole model.

    It must run before kernels copy and drop the weights.
    """
    family = model.family
    _check_layers(family)
    prompt = make_prompt(model, CHUNKS[-1])
    chunks = _run_chunks(model, block_size, prompt)
    whole, noise = _run_transformers(model, prompt)
    difference = _distance(chunks, whole)
    if _has_experts(family):
        # Rounding may choose other experts for a token, which changes its logits more.
        difference = _medians(difference)
    if not model.keeps_states:
        # A recurrence amplifies the rounding of a few tokens, in both differences.
        noise = _medians(noise)
    limit = min(MAX_NOISE * float(noise.max()), MAX_DIFFERENCE)
    if not bool((difference <= limit).all()):
        raise ConfigError(
            f"models.path: the answers of this model of type {family.model.config.model_type!r}"
            f" differ from transformers' by {float(difference.max()):.2g} of their spread, more"
            f" than {limit:.2g}; its type needs a family in shared/models/families",
            field="models.path",
        )


def _run_transformers(model: FlatModel, prompt: CheckPrompt) -> tuple[Tensor, Tensor]:
    """Return the logits of a pass, [num_tokens, vocab_size], and the noise of each row."""
    layer_inputs = model.family.layer_inputs(prompt.token_ids)
    run: Any = partial(model.family.model, use_cache=False, **layer_inputs)
    embeddings = prompt.embeddings[None]
    # In float64, transformers computes the softmax of attention in float32.
    unit = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    generator = torch.Generator().manual_seed(SEED)
    change = 1 + unit * torch.randn(embeddings.shape, generator=generator, dtype=torch.float64)
    changed = (embeddings.double() * change.to(model.device)).to(model.dtype)
    with _attention(model.family.decoder, "eager"):
        whole = prompt.run(model.family.model, len(prompt.token_ids), use_cache=False)
        plain, moved = (run(inputs_embeds=rows).logits[0] for rows in (embeddings, changed))
    return whole.logits[0], _distance(moved, plain)


def _run_chunks(model: FlatModel, block_size: int, prompt: CheckPrompt) -> Tensor:
    """Return the engine's logits, [num_tokens, vocab_size]."""
    states = model.new_states(1)
    num_blocks = -(-len(prompt.token_ids) // block_size)
    table = list(reversed(range(num_blocks)))
    kv_cache = model.new_cache(num_blocks, block_size)
    logits = []
    # No chunk divides a span.
    bounds = [n for n in CHUNKS if not any(start < n < stop for start, stop in prompt.spans)]
    for start, stop in itertools.pairwise(bounds):
        rows = torch.arange(stop - start, device=model.device)
        spans = [span for span in prompt.spans if start < span[1] <= stop]
        moved = states.step([0, stop - start], [stop], [0])
        step = StepInputs(
            prompt.embeddings[start:stop],
            prompt.positions[:, start:stop],
            model.plan(BatchLayout([table], [0, stop - start], [stop], [spans]), kv_cache),
            kv_cache,
            # The reversed order shows whether the model returns the logits of these rows.
            rows.flip(0),
            token_ids=prompt.token_ids[start:stop],
            states=moved,
        )
        logits.append(model.forward(step).flip(0))
        moved.commit()
    return torch.cat(logits)


def _distance(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the root mean square of each row's difference, relative to the row's spread."""
    difference = (logits.float() - expected.float()).square().mean(dim=-1).sqrt()
    return difference / expected.float().std(dim=-1)


def _medians(rows: Tensor) -> Tensor:
    """Return the median of each four rows."""
    return rows.view(-1, 4).median(dim=1).values


def _has_experts(family: LanguageAdapter) -> bool:
    return any("expert" in name for name, _ in family.decoder.named_modules())


class _Layer(NamedTuple):
    """The attention of a layer."""

    num_kv_heads: int
    head_dim: int
    window: Window

    def __str__(self) -> str:
        return (
            f"{self.num_kv_heads} heads of {self.head_dim} numbers, and a window of {self.window}"
            " tokens"
        )


def _check_layers(family: LanguageAdapter) -> None:
    """Raise ConfigError unless the attention of each layer has the form that the config names."""
    layers: dict[int, _Layer] = {}

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: Window = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        if "kv_cache" not in kwargs:
            raise NotImplementedError(f"{type(module).__name__} does not get the engine's cache")
        # Values may be smaller than keys, and not larger.
        layer = _Layer(key.shape[1], max(key.shape[3], value.shape[3]), sliding_window)
        layers[int(module.layer_idx)] = layer  # type: ignore[arg-type]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDER, record)
    with _attention(family.decoder, _RECORDER):
        token_ids = torch.zeros(1, 2, dtype=torch.int64, device=family.model.device)
        family.decoder(input_ids=token_ids, use_cache=False, kv_cache=None)
    config = family.decoder.config
    layers_of_config = zip(
        layer_kinds(config), kv_shapes(config), layer_windows(config), strict=True
    )
    for index, (kind, shape, window) in enumerate(layers_of_config):
        if kind not in ATTENTION_KINDS:
            continue
        named = _Layer(*shape, window)
        if layers.get(index) != named:
            raise ConfigError(
                f"models.path: config.json names {named} for layer {index}, but transformers'"
                f" layer has {layers.get(index, 'no attention')}",
                field="models.path",
            )


@contextmanager
def _attention(decoder: Any, implementation: str) -> Iterator[None]:
    """Run a decoder with another implementation of attention."""
    served = decoder.config._attn_implementation
    decoder.set_attn_implementation(implementation)
    try:
        yield
    finally:
        decoder.set_attn_implementation(served)
