"""What differs between model families in their language model: where its tokens stand.

A family wraps a transformers model as it is. It knows neither the KV cache nor batches. What makes
embeddings of its items is in `shared.vision.towers`; here they are only checked.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, cast

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from shared.errors import InvalidRequest, UnsupportedContent
from shared.protocol.multimodal import IMAGE
from shared.vision.towers import Qwen3Tower, QwenTower, TowerAdapter, vision_of
from workers.engine.core.sequence import EngineRequest, Item


@dataclass(frozen=True, slots=True)
class PromptPositions:
    """Rotary positions of a prompt; token t behind it stands at t + delta in every row."""

    prompt: Tensor  # [num_position_rows, num_prompt_tokens] int64
    delta: int


class LanguageAdapter:
    """A plain decoder: one row of positions, which are the tokens' indices."""

    num_position_rows = 1

    def __init__(self, model: PreTrainedModel, vision: TowerAdapter | None = None) -> None:
        """`model` may lack the modules of its tower."""
        self.model = model
        self.vision = vision

    @property
    def decoder(self) -> PreTrainedModel:
        """The language model without its head and without towers."""
        model: Any = self.model
        return cast(PreTrainedModel, model.get_decoder())

    def check(self, request: EngineRequest) -> None:
        """Raises what is wrong with the items; whoever encodes and locates takes them for granted.

        That is UnsupportedContent or InvalidRequest.
        """
        for item in request.items:
            if self.vision is None:
                raise UnsupportedContent("this model reads text only", field="items")
            if item.modality != IMAGE:
                raise UnsupportedContent(f"no {item.modality!r} input in this model", field="items")
            if item.embedding is None:
                self.vision.check(item.fields)
            else:
                self.vision.check_embedding(item.fields, item.embedding)
            self._check_placeholder(item, self.vision.count(item.fields), request.prompt_token_ids)

    def locate(self, request: EngineRequest) -> PromptPositions | None:
        """Of a prompt with items; None where every token stands at its index."""
        return None

    def forward(
        self,
        embeddings: Tensor,  # [1, num_tokens, hidden_size]
        positions: Tensor,  # [num_position_rows, num_tokens]
        sampled_rows: Tensor,  # [num_sampled]
        deepstack: Tensor | None,  # [num_levels, num_tokens, hidden_size]
        **attention: Any,
    ) -> Tensor:  # logits, [1, num_sampled, vocab_size]
        """Through the model's own head, for some families scale or bound their logits there.

        `attention` is handed down to the attention of every layer.
        """
        assert deepstack is None, "this family has no further levels of features"
        model: Any = self.model
        logits: Tensor = model(
            inputs_embeds=embeddings,
            position_ids=positions if len(positions) == 1 else positions[:, None],
            logits_to_keep=sampled_rows,
            use_cache=False,
            **attention,
        ).logits
        return logits

    def _check_placeholder(self, item: Item, count: int, prompt_token_ids: list[int]) -> None:
        start, num_embeds = item.placeholder.offset, item.placeholder.num_embeds
        if num_embeds != count:
            _refuse(f"{num_embeds} placeholders for {count} embeddings")
        image_token_id = self.model.config.image_token_id
        places = [start + index for index in item.placeholder.embed_indexes()]
        if start < 0 or any(prompt_token_ids[i : i + 1] != [image_token_id] for i in places):
            _refuse(f"the prompt has no {num_embeds} image tokens at {start}")


class Qwen2VLAdapter(LanguageAdapter):
    """Positions in time, height and width: a picture's tokens stand in a grid (M-RoPE)."""

    num_position_rows = 3

    def check(self, request: EngineRequest) -> None:
        super().check(request)
        if any(item.placeholder.is_embed is not None for item in request.items):
            _refuse("a picture's placeholder is one run of tokens in this model")
        _check_apart(_in_order(request.items))

    def locate(self, request: EngineRequest) -> PromptPositions | None:
        if not request.items:
            return None
        token_ids = torch.tensor([request.prompt_token_ids])
        is_image = torch.zeros_like(token_ids)
        items = _in_order(request.items)
        for item in items:
            start = item.placeholder.offset
            is_image[0, start : start + item.placeholder.length] = 1
        model: Any = self.model
        positions, delta = model.model.get_rope_index(
            token_ids, mm_token_type_ids=is_image, image_grid_thw=_grids(items)
        )
        return PromptPositions(positions[:, 0], int(delta))


class Qwen3VLAdapter(Qwen2VLAdapter):
    """The hidden states behind the first layers are given further features of the pictures."""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        if deepstack is None:
            return super().forward(embeddings, positions, sampled_rows, None, **attention)
        # The whole model would make these of pixels, and takes none that are made.
        model: Any = self.model
        hidden = model.model.language_model(
            inputs_embeds=embeddings,
            position_ids=positions[:, None],
            visual_pos_masks=torch.ones(embeddings.shape[:2], dtype=torch.bool),
            deepstack_visual_embeds=list(deepstack),
            use_cache=False,
            **attention,
        ).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, sampled_rows])
        return logits


def _in_order(items: Sequence[Item]) -> list[Item]:
    return sorted(items, key=lambda item: item.placeholder.offset)


def _grids(items: Sequence[Item]) -> Tensor:  # [num_items, 3]
    return torch.stack([item.fields["image_grid_thw"] for item in items])


def _check_apart(items: Sequence[Item]) -> None:
    """transformers tells pictures apart by the text between them, so there must be some."""
    for left, right in itertools.pairwise(items):
        if left.placeholder.offset + left.placeholder.length >= right.placeholder.offset:
            _refuse("the placeholders of two pictures touch")


def _refuse(message: str) -> NoReturn:
    raise InvalidRequest(message, field="items")


# The narrower kinds first.
_KINDS: tuple[tuple[type[TowerAdapter], type[LanguageAdapter]], ...] = (
    (Qwen3Tower, Qwen3VLAdapter),
    (QwenTower, Qwen2VLAdapter),
)


def family_of(model: PreTrainedModel) -> LanguageAdapter:
    """Around a model that may or may not have its tower."""
    found = vision_of(model.config)
    if found is None:
        return LanguageAdapter(model)
    vision, _ = found
    for seen, kind in _KINDS:
        if isinstance(vision, seen):
            return kind(model, vision)
    return LanguageAdapter(model, vision)


def class_of(config: PreTrainedConfig) -> Any:
    """The transformers class that loads a model."""
    found = vision_of(config)
    return AutoModelForCausalLM if found is None else found[1]
