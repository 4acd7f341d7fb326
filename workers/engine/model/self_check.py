"""Self-check of generic families: the engine's logits against the logits of transformers.

A declared family has tests, but a generic one may depend on something that the engine does not do,
in a version or with a setting that no test has. Windows and scales that begin after more tokens are
not noticed, and neither are differences below the rounding of the model's dtype.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface

from shared.errors import ConfigError
from shared.models.language import LanguageAdapter
from workers.engine.model.check_prompt import CheckPrompt, make_prompt
from workers.engine.model.flat_model import BatchLayout, FlatModel, StepInputs
from workers.engine.model.step_plan import Window
from workers.engine.model.support import layer_windows

CHUNKS = (0, 12, 20, 21, 22, 23, 24)
"""Bounds of the engine's chunks: two of a prefill, and four decodes."""

# The difference may be this many times the difference between two passes of transformers, plus this
# many units of the dtype's precision. Both are relative to the spread of a row's logits. Rounding
# may choose other experts for a token, which changes its logits more.
MAX_NOISE, MAX_UNITS, MAX_EXPERT_UNITS = 4, 16, 64

_RECORDER = "pagemill_recorder"


@torch.inference_mode()
def check_against_whole(model: FlatModel, block_size: int) -> None:
    """Raise ConfigError if the engine computes other logits than transformers' whole model.

    A whole pass is compared with two passes with transformers' cache, which shows the rounding, and
    with the engine's chunks and decodes. It must run before kernels copy and drop the weights.
    """
    family = model.family
    _check_windows(family)
    prompt = make_prompt(model, CHUNKS[-1])
    whole, pieces = _run_transformers(family.model, prompt)
    own = _run_chunks(model, block_size, prompt)
    noise, difference = _distance(pieces, whole), _distance(own, whole)
    # In float64, transformers computes the softmax of attention in float32.
    unit = max(torch.finfo(model.dtype).eps, torch.finfo(torch.float32).eps)
    units = MAX_UNITS
    if _has_experts(family):
        units, difference = MAX_EXPERT_UNITS, difference.view(-1, 4).median(dim=1).values
    limit = MAX_NOISE * float(noise.max()) + units * unit
    if not bool((difference <= limit).all()):
        raise ConfigError(
            f"models.path: the answers of this model of type {family.model.config.model_type!r}"
            f" differ from transformers' by {float(difference.max()):.2g} of their spread, more"
            f" than {limit:.2g}; its type needs a family in shared/models/families",
            field="models.path",
        )


def _run_transformers(model: Any, prompt: CheckPrompt) -> tuple[Tensor, Tensor]:
    """Return the logits of one pass and of two passes, each [num_tokens, vocab_size]."""
    decoder, num_tokens = model.get_decoder(), len(prompt.token_ids)
    middle = num_tokens // 2
    with _attention(decoder, "eager"):
        whole = prompt.run(model, num_tokens, use_cache=False).logits[0]
        first = prompt.run(model, middle, use_cache=True)
        second = model(
            input_ids=prompt.token_ids[None, middle:],
            past_key_values=first.past_key_values,
            use_cache=True,
        )
    return whole, torch.cat([first.logits[0], second.logits[0]])


def _run_chunks(model: FlatModel, block_size: int, prompt: CheckPrompt) -> Tensor:
    """Return the engine's logits, [num_tokens, vocab_size]."""
    num_blocks = -(-len(prompt.token_ids) // block_size)
    table = list(reversed(range(num_blocks)))
    kv_cache = model.new_cache(num_blocks, block_size)
    logits = []
    for start, stop in itertools.pairwise(CHUNKS):
        rows = torch.arange(stop - start, device=model.device)
        step = StepInputs(
            prompt.embeddings[start:stop],
            prompt.positions[:, start:stop],
            model.plan(BatchLayout([table], [0, stop - start], [stop]), kv_cache),
            kv_cache,
            # The reversed order shows whether the model returns the logits of these rows.
            rows.flip(0),
        )
        logits.append(model.forward(step).flip(0))
    return torch.cat(logits)


def _distance(logits: Tensor, expected: Tensor) -> Tensor:
    """Return the root mean square of each row's difference, relative to the row's spread."""
    difference = (logits.float() - expected.float()).square().mean(dim=-1).sqrt()
    return difference / expected.float().std(dim=-1)


def _has_experts(family: LanguageAdapter) -> bool:
    return any("expert" in name for name, _ in family.decoder.named_modules())


def _check_windows(family: LanguageAdapter) -> None:
    """Raise ConfigError unless each layer asks for the window that the config names."""
    windows: dict[int, Window] = {}

    def record(
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        sliding_window: Window = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        windows[int(module.layer_idx)] = sliding_window  # type: ignore[arg-type]
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None

    AttentionInterface.register(_RECORDER, record)
    with _attention(family.decoder, _RECORDER):
        token_ids = torch.zeros(1, 2, dtype=torch.int64, device=family.model.device)
        family.decoder(input_ids=token_ids, use_cache=False)
    for layer, window in enumerate(layer_windows(family.decoder.config)):
        if windows.get(layer) != window:
            raise ConfigError(
                f"models.path: config.json names a window of {window} tokens for layer {layer}, but"
                f" transformers' layer has a window of {windows.get(layer)}",
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
