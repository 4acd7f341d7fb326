"""The model of the demo and the losses of both phases."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from ops.training.seeing.batches import IGNORED, LABELS, ChatBatch, TowerBatch
from ops.training.seeing.scenes import CELL, MEAN, MERGE, PATCH, STD
from ops.training.seeing.tokenizer import CONTEXT, VOCABULARY, special_ids
from ops.training.trainer import init_normal


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen2VLForConditionalGeneration:
    ids = special_ids(tokenizer)
    stops = {"eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|endoftext|>"]}
    config = Qwen2VLConfig(
        text_config={
            "vocab_size": VOCABULARY,
            "hidden_size": 192,
            "intermediate_size": 512,
            "num_hidden_layers": 3,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "rms_norm_eps": 1e-6,
            "tie_word_embeddings": True,
            "bos_token_id": ids["<|endoftext|>"],
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [4, 6, 6],
            },
            **stops,
        },
        vision_config={
            "depth": 4,
            "embed_dim": 128,
            "hidden_size": 192,
            "num_heads": 4,
            "mlp_ratio": 4,
            "hidden_act": "gelu",
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=True,
    )
    model = Qwen2VLForConditionalGeneration(config)
    ends = ("attn.proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")
    init_normal(model, residual=ends)
    # Eager attention: for sequences this short its backward is the fastest on a CPU.
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(do_sample=False, max_new_tokens=64, **stops)
    return model


def patches_of(pixels: Tensor) -> Tensor:
    """Normalised patches in the order of the image processor.

    Patches of pictures have no time axis; patches of pairs of frames have both frames.
    """
    if pixels.dim() == 5:
        both = [patches_of(frame).unflatten(-1, (3, -1)) for frame in pixels.unbind(1)]
        return torch.stack(both, dim=-2).flatten(2)
    mean = torch.tensor(MEAN, device=pixels.device).view(3, 1, 1)
    std = torch.tensor(STD, device=pixels.device).view(3, 1, 1)
    x = (pixels.float() / 255 - mean) / std
    batch, _, height, width = x.shape
    x = x.reshape(batch, 3, height // CELL, MERGE, PATCH, width // CELL, MERGE, PATCH)
    return x.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(batch, -1, 3 * PATCH * PATCH)


def tower_rotation(visual: Any, rows: int, columns: int, device: torch.device) -> tuple[Any, Any]:
    grid = torch.stack(torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij"))
    grid = grid.reshape(2, rows // MERGE, MERGE, columns // MERGE, MERGE)
    grid = grid.permute(1, 3, 2, 4, 0).reshape(-1, 2, 1).to(device)
    angles = (grid * visual.rotary_pos_emb.inv_freq.to(device)).flatten(1).repeat(1, 2)
    return angles.cos(), angles.sin()


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return x * cos + torch.cat((-x[..., half:], x[..., :half]), dim=-1) * sin


def tower_forward(visual: Any, pixels: Tensor) -> Tensor:
    """The vision tower over pictures or pairs of frames of one size, with transformers' weights.

    transformers takes the pictures of a batch one by one in its attention and embeds patches by a
    slow three-dimensional convolution; a still picture repeats its one frame along the time axis,
    so that the convolution is a linear layer with the weights summed over time. The pairs of a clip
    do not see one another in the tower, so each is an element of the batch.
    """
    rows, columns = pixels.shape[-2] // PATCH, pixels.shape[-1] // PATCH
    cos, sin = tower_rotation(visual, rows, columns, pixels.device)
    weight = visual.patch_embed.proj.weight
    weight = (weight.sum(dim=2) if pixels.dim() == 4 else weight).flatten(1)
    x = F.linear(patches_of(pixels), weight)
    for block in visual.blocks:
        attention = block.attn
        qkv = attention.qkv(block.norm1(x))
        qkv = qkv.view(*x.shape[:2], 3, attention.num_heads, -1).permute(2, 0, 3, 1, 4)
        cos, sin = cos.to(qkv.dtype), sin.to(qkv.dtype)
        q, k = rotated(qkv[0], cos, sin), rotated(qkv[1], cos, sin)
        scores = (q @ k.transpose(-2, -1)) * attention.scaling
        mixed = scores.softmax(dim=-1).to(qkv.dtype) @ qkv[2]
        x = x + attention.proj(mixed.transpose(1, 2).flatten(2))
        x = x + block.mlp(block.norm2(x))
    features: Tensor = visual.merger(x).view(
        pixels.shape[0], -1, visual.merger.mlp[-1].out_features
    )
    return features


class Heads(nn.Module):
    """Classifiers of the first phase over the mean of an image's tokens."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.trunk = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU())
        self.out = nn.ModuleDict({name: nn.Linear(256, len(v)) for name, v in LABELS.items()})

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        hidden = self.trunk(tokens.mean(dim=1))
        return {name: layer(hidden) for name, layer in self.out.items()}


def tower_loss(visual: Any, heads: Heads, batch: TowerBatch) -> tuple[Tensor, dict[str, float]]:
    logits: dict[str, list[Tensor]] = {name: [] for name in LABELS}
    order = torch.cat([group.index for group in batch.groups])
    for group in batch.groups:
        for name, part in heads(tower_forward(visual, group.pixels)).items():
            logits[name].append(part)
    total, right = torch.zeros((), device=order.device), {}
    for name, parts in logits.items():
        scores, labels = torch.cat(parts).float(), batch.labels[name][order]
        is_labelled = labels != IGNORED
        total = total + F.cross_entropy(scores, labels, ignore_index=IGNORED, reduction="sum")
        hits = (scores.argmax(dim=1) == labels)[is_labelled]
        right[name] = hits.float().mean().item()
    return total / len(order), right


def text_rotation(text: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines for positions of shape [3, rows, length]: an axis for each frequency."""
    sections = torch.tensor(text.config.rope_parameters["mrope_section"], device=positions.device)
    axes = torch.arange(3, device=positions.device).repeat_interleave(sections)
    angles = positions[axes].permute(1, 2, 0) * text.rotary_emb.inv_freq
    angles = torch.cat((angles, angles), dim=-1)[:, None]
    return angles.cos(), angles.sin()


def text_forward(
    text: Any, embeds: Tensor, positions: Tensor, hidden_from: Tensor, chosen: Tensor
) -> Tensor:
    """Return the last states of the text model at the chosen places of [rows, length].

    After its attention, the last layer computes no other states.
    """
    rows, length, _ = embeds.shape
    cos, sin = text_rotation(text, positions)
    mask = torch.zeros(hidden_from.shape, device=embeds.device).masked_fill(hidden_from, -1e4)
    x = embeds
    for layer in text.layers:
        attention = layer.self_attn
        normal = layer.input_layernorm(x)
        q, k, v = (
            project(normal).view(rows, length, -1, attention.head_dim).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        cos, sin, mask = cos.to(q.dtype), sin.to(q.dtype), mask.to(q.dtype)
        # Heads that share a key stand together as rows of one product.
        q = rotated(q, cos, sin).reshape(rows, k.shape[1], -1, length, attention.head_dim)
        k, v = rotated(k, cos, sin)[:, :, None], v[:, :, None]
        scores = q @ k.transpose(-2, -1) * attention.scaling + mask[:, :, None]
        mixed = (scores.softmax(dim=-1).to(v.dtype) @ v).flatten(1, 2)
        mixed = mixed.transpose(1, 2).flatten(2)
        if layer is text.layers[-1]:
            mixed, x = mixed.flatten(0, 1)[chosen], x.flatten(0, 1)[chosen]
        x = x + attention.o_proj(mixed)
        x = x + layer.mlp(layer.post_attention_layernorm(x))
    states: Tensor = text.norm(x)
    return states


# Number of rows of similar length that go through the text model as one batch.
ROWS_TOGETHER = 16


def answer_states(model: Qwen2VLForConditionalGeneration, batch: ChatBatch) -> Tensor:
    """The states that predict the tokens of all answers."""
    text = model.model.language_model
    embeds = text.embed_tokens(batch.ids)
    flat = embeds.flatten(0, 1)
    for group in batch.groups:
        tokens = tower_forward(model.model.visual, group.pixels).flatten(0, 1)
        flat = flat.index_copy(0, group.index, tokens.to(flat.dtype))
    embeds = flat.view_as(embeds)
    rows, full = batch.ids.shape
    later = torch.ones((full, full), dtype=torch.bool, device=embeds.device).triu(1)
    row_of, column_of = batch.predict_at // full, batch.predict_at % full
    parts = []
    for first in range(0, rows, ROWS_TOGETHER):
        these = slice(first, first + ROWS_TOGETHER)
        # In steps of eight, to meet few different shapes.
        length = min(full, -(-max(batch.lengths[these]) // 8) * 8)
        # Padding is on the right, where a causal mask hides it by itself.
        turns = batch.turns[these, :length]
        hidden_from = (turns[:, None] != 0) & (turns[:, None] != turns[..., None])
        hidden_from = (hidden_from | later[:length, :length])[:, None]
        here = (row_of >= first) & (row_of < first + ROWS_TOGETHER)
        chosen = (row_of[here] - first) * length + column_of[here]
        positions = batch.positions[:, these, :length]
        parts.append(text_forward(text, embeds[these, :length], positions, hidden_from, chosen))
    return torch.cat(parts)


def chat_loss(
    model: Qwen2VLForConditionalGeneration, batch: ChatBatch
) -> tuple[Tensor, dict[str, float]]:
    chosen = answer_states(model, batch)
    with torch.autocast(chosen.device.type, enabled=False):
        logits = model.lm_head(chosen.float())
    losses = F.cross_entropy(logits, batch.targets, reduction="none")
    right = (logits.argmax(dim=1) == batch.targets).float()
    mean = batch.weights.sum()
    return (losses * batch.weights).sum() / mean, {
        "tokens": ((right * batch.weights).sum() / mean).item()
    }
