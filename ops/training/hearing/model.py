"""The model that hears, and its loss."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import GenerationConfig, PreTrainedTokenizerFast

from ops.training.folders import HEARING, SEEING
from ops.training.hearing.samples import Sample
from ops.training.hearing.sounds import MAX_S, RATE
from ops.training.trainer import init_normal

# mypy knows neither omni classes nor this extractor in transformers.
transformers: Any = importlib.import_module("transformers")

AUDIO_MARKS = ("<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>")
NUM_BINS = 64
WINDOW_S = 30
HALF_CHUNK = 100
"""Half of the frames of a chunk, within which the tower attends."""
NUM_LABELS = 20
CONTEXT = 4096
CHAT_TEMPLATE = HEARING / "chat_template.jinja"


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Return the demo model's tokenizer with tokens for the marks of sounds."""
    tokenizer: PreTrainedTokenizerFast = PreTrainedTokenizerFast.from_pretrained(SEEING)
    tokenizer.add_special_tokens({"additional_special_tokens": list(AUDIO_MARKS)})
    tokenizer.chat_template = CHAT_TEMPLATE.read_text(encoding="utf-8")
    return tokenizer


def build_extractor() -> Any:
    return transformers.WhisperFeatureExtractor(
        feature_size=NUM_BINS, chunk_length=WINDOW_S, return_attention_mask=True
    )


def build_model(tokenizer: PreTrainedTokenizerFast, width: int, layers: int) -> Any:
    ids = tokenizer.get_vocab()
    bos, audio, eos = (ids[mark] for mark in AUDIO_MARKS)
    tower = {
        "num_mel_bins": NUM_BINS,
        "d_model": width,
        "encoder_layers": layers,
        "encoder_attention_heads": 4,
        "encoder_ffn_dim": 2 * width,
        "max_source_positions": 1500,
        "n_window": HALF_CHUNK,
        "output_dim": width,
    }
    # The smallest vision tower that the class allows. It is not trained.
    eyes = {
        "depth": 1,
        "hidden_size": 16,
        "num_heads": 2,
        "intermediate_size": 16,
        "out_hidden_size": width,
        "fullatt_block_indexes": [0],
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": True,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": [width // 32, width // 32, width // 8 - 2 * (width // 32)],
        },
    }
    config = transformers.Qwen2_5OmniThinkerConfig(
        audio_config=tower,
        vision_config=eyes,
        text_config=text,
        audio_token_index=audio,
        image_token_index=ids["<|image_pad|>"],
        video_token_index=ids["<|video_pad|>"],
        audio_start_token_id=bos,
        audio_end_token_id=eos,
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        tie_word_embeddings=True,
    )
    model = transformers.Qwen2_5OmniThinkerForConditionalGeneration(config)
    ends = ("out_proj.weight", "fc2.weight", "o_proj.weight", "down_proj.weight")
    init_normal(model, residual=ends)
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(
        do_sample=False,
        max_new_tokens=32,
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
    )
    return model


# -- batches --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Batch:
    ids: Tensor  # [batch, length]
    is_answer: Tensor  # [batch, length], where the next token is one of the answer
    lengths: Tensor  # [num_sounds] in frames
    features: Tensor  # [num_sounds, bins, frames]
    labels: Tensor  # [num_sounds]

    @property
    def num_samples(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return self.ids.numel()


def count_tokens(num_frames: int) -> int:
    return ((num_frames - 1) // 2 + 1) // 2


class Batcher:
    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self._tokenizer = tokenizer
        self._extractor = build_extractor()
        self._cached: dict[str, list[int]] = {}
        self.bos, self.audio, self.eos = (self.ids(mark)[0] for mark in AUDIO_MARKS)

    def ids(self, text: str) -> list[int]:
        if text not in self._cached:
            self._cached[text] = self._tokenizer.encode(text, add_special_tokens=False)
        return self._cached[text]

    def collate(self, samples: Sequence[Sample]) -> Batch:
        rows, answers, lengths, waves = [], [], [], []
        for sample in samples:
            sound: list[int] = []
            if sample.wave is not None:
                lengths.append(-(-len(sample.wave) // 160))
                waves.append(sample.wave)
                sound = [self.bos, *[self.audio] * count_tokens(lengths[-1]), self.eos]
            question = self.ids(sample.question)
            body = [*sound, *question] if sample.is_sound_first else [*question, *sound]
            prompt = [*self.ids("<|im_start|>"), *self.ids("user\n"), *body]
            prompt += [*self.ids("<|im_end|>"), *self.ids("\n"), *self.ids("<|im_start|>")]
            prompt += self.ids("assistant\n")
            answer = [*self.ids(sample.answer), *self.ids("<|im_end|>")]
            rows.append(prompt + answer)
            answers.append((len(prompt) - 1, len(prompt) + len(answer) - 1))
        longest = max(map(len, rows))
        ids = torch.zeros(len(rows), longest, dtype=torch.long)
        is_answer = torch.zeros(len(rows), longest, dtype=torch.bool)
        for i, (row, (start, stop)) in enumerate(zip(rows, answers, strict=True)):
            ids[i, : len(row)] = torch.tensor(row)
            is_answer[i, start:stop] = True
        labels = [sample.label for sample in samples if sample.wave is not None]
        features = self._extract(waves, max(lengths))
        return Batch(ids, is_answer, torch.tensor(lengths), features, torch.tensor(labels))

    def _extract(self, waves: list[np.ndarray], longest: int) -> Tensor:
        output = self._extractor(
            waves,
            sampling_rate=RATE,
            padding="max_length",
            max_length=int(RATE * (MAX_S + 0.4)),
            return_tensors="np",
        )
        return torch.from_numpy(output["input_features"][:, :, :longest])


# -- the forward pass -----------------------------------------------------------------------------


def tower_forward(tower: Any, features: Tensor, lengths: Tensor) -> Tensor:
    """The audio tower over padded sounds, with transformers' own weights: [sounds, tokens, width].

    transformers attends to the chunks of a batch one by one.
    """
    size = 2 * HALF_CHUNK
    num_sounds, num_bins, num_frames = features.shape
    num_chunks = -(-num_frames // size)
    x = F.pad(features, (0, num_chunks * size - num_frames))
    chunks = x.view(num_sounds, num_bins, num_chunks, size).transpose(1, 2).flatten(0, 1)
    starts = torch.arange(num_chunks) * size
    here = (lengths[:, None] - starts).clamp(0, size).flatten()  # frames in each chunk
    mask = (torch.arange(size) < here[:, None])[:, None]
    embedded = F.gelu(tower.conv1(chunks * mask)) * mask
    embedded = F.gelu(tower.conv2(embedded)).transpose(1, 2)
    embedded = embedded + tower.positional_embedding.positional_embedding[:HALF_CHUNK]
    hidden_mask = torch.arange(HALF_CHUNK) < (here[:, None] + 1) // 2
    bias = torch.zeros(len(here), 1, 1, HALF_CHUNK).masked_fill(~hidden_mask[:, None, None], -1e4)
    for layer in tower.layers:
        attention, normed = layer.self_attn, layer.self_attn_layer_norm(embedded)
        q, k, v = (
            project(normed).unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            for project in (attention.q_proj, attention.k_proj, attention.v_proj)
        )
        scores = (q @ k.transpose(-2, -1)) * attention.scaling + bias
        mixed = scores.softmax(dim=-1).to(v.dtype) @ v
        embedded = embedded + attention.out_proj(mixed.transpose(1, 2).flatten(2))
        normed = layer.final_layer_norm(embedded)
        embedded = embedded + layer.fc2(layer.activation_fn(layer.fc1(normed)))
    # A chunk in the middle of a sound is full, so that pairs never cross its end.
    whole = embedded.reshape(num_sounds, num_chunks * HALF_CHUNK, -1)
    pooled = (whole[:, 0::2] + whole[:, 1::2]) / 2
    projected: Tensor = tower.proj(tower.ln_post(pooled))
    return projected


class Heads(nn.Module):
    """A classifier of whole sounds that is thrown away after the training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Sequential(nn.LayerNorm(2 * width), nn.Linear(2 * width, NUM_LABELS))

    def forward(self, tokens: Tensor, is_token: Tensor) -> Tensor:
        sums = (tokens * is_token[..., None]).sum(dim=1)
        mean = sums / is_token.sum(dim=1, keepdim=True)
        most = tokens.masked_fill(~is_token[..., None], -1e4).amax(dim=1)
        scores: Tensor = self.out(torch.cat([mean, most], dim=-1))
        return scores


def loss_of(model: Any, heads: Heads, batch: Batch, audio_id: int) -> tuple[Tensor, Tensor, float]:
    """Return the loss of the answers, the loss of the classifier, and the share of right tokens."""
    tokens = tower_forward(model.model.audio_tower, batch.features, batch.lengths)
    counts = torch.div(
        torch.div(batch.lengths - 1, 2, rounding_mode="floor") + 1, 2, rounding_mode="floor"
    )
    is_token = torch.arange(tokens.shape[1]) < counts[:, None]
    text = model.model.language_model
    embeds = text.embed_tokens(batch.ids)
    places = (batch.ids == audio_id).flatten().nonzero()[:, 0]
    flat = embeds.flatten(0, 1).index_copy(0, places, tokens[is_token].to(embeds.dtype))
    length = batch.ids.shape[1]
    mask = torch.full((length, length), -1e4).triu(1)[None, None]
    hidden = text(
        inputs_embeds=flat.view_as(embeds),
        attention_mask={"full_attention": mask},
        use_cache=False,
    ).last_hidden_state
    answers = batch.ids[:, 1:][batch.is_answer[:, :-1]]
    with torch.autocast("cpu", enabled=False):
        scores = model.lm_head(hidden[batch.is_answer].float())
        loss = F.cross_entropy(scores, answers)
        class_loss = F.cross_entropy(heads(tokens.float(), is_token), batch.labels)
    return loss, class_loss, (scores.argmax(-1) == answers).float().mean().item()
