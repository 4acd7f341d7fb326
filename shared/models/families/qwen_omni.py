"""Thinkers of Qwen2.5-Omni and Qwen3-Omni, which write the text.

A model's folder has its talker and its vocoder too. Sound and videos are no inputs here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedConfig

from shared.models.families.qwen_vl import QwenAdapter, QwenImageLayout, QwenTower, sort_by_offset
from shared.models.family import MediaInput, ModelFamily, VocoderKind
from shared.models.language import MediaPrompt, PromptPositions
from shared.models.lazy_module import LazyModule
from shared.protocol.multimodal import IMAGE

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")


class OmniTower(QwenTower):
    """The vision tower of a thinker."""

    modules = ("model.visual", "model.audio_tower")
    language_modules = ("model.language_model", "model.audio_tower", "lm_head")

    def __init__(self, config: PreTrainedConfig) -> None:
        # The whole model's config, or that of the thinker alone.
        super().__init__(getattr(config, "thinker_config", config))

    def optimize_layers(self, model: Any) -> None:
        """Nothing is replaced: Qwen2.5-Omni has other projections than Qwen2.5-VL."""


class Qwen3OmniTower(OmniTower):
    """Features of earlier layers stand behind each embedding, as in Qwen3-VL."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_levels = len(self._config.vision_config.deepstack_visual_indexes)

    def _embed(self, model: Any, pixel_values: Tensor, grids: Tensor) -> list[Tensor]:
        encoded = model.get_image_features(pixel_values, grids)
        levels = zip(encoded.pooler_output, *encoded.deepstack_features, strict=True)
        return [torch.cat(image_levels, dim=-1) for image_levels in levels]


class ThinkerAdapter(QwenAdapter):
    """A thinker: its forward has no choice of rows, so its decoder and its head are run apart."""

    def locate(self, prompt: MediaPrompt) -> PromptPositions | None:
        if not prompt.items:
            return None
        token_ids = torch.tensor([prompt.prompt_token_ids])
        items = sort_by_offset(prompt.items)
        grids = torch.stack([item.fields["image_grid_thw"] for item in items])  # [num_items, 3]
        model: Any = self.model
        positions, delta = model.get_rope_index(
            token_ids, image_grid_thw=grids, attention_mask=torch.ones_like(token_ids)
        )
        return PromptPositions(positions[:, 0].long(), int(delta))

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        model: Any = self.model
        if deepstack is not None:
            attention["visual_pos_masks"] = torch.ones(embeddings.shape[:2], dtype=torch.bool)
            attention["deepstack_visual_embeds"] = list(deepstack)
        hidden = self.decoder(
            inputs_embeds=embeddings, position_ids=positions[:, None], use_cache=False, **attention
        ).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, sampled_rows])
        return logits

    @property
    def decoder(self) -> Any:
        model: Any = self.model
        return model.model.language_model


def _family(
    name: str, model_type: str, kind: str, tower: type[OmniTower], vocoder: VocoderKind
) -> ModelFamily:
    index = "image_token_id" if kind.startswith("Qwen3") else "image_token_index"
    return ModelFamily(
        name,
        frozenset({model_type, f"{model_type}_thinker"}),
        media={IMAGE: MediaInput(QwenImageLayout, placeholder=index)},
        tower=tower,
        language=ThinkerAdapter,
        vocoder=vocoder,
        talker="code_predictor" if vocoder == "code2wav" else "thinker_states",
        model_class=f"{kind}ThinkerForConditionalGeneration",
    )


FAMILIES: Sequence[ModelFamily] = (
    _family("Qwen2.5-Omni", "qwen2_5_omni", "Qwen2_5Omni", OmniTower, "token2wav"),
    _family("Qwen3-Omni", "qwen3_omni_moe", "Qwen3OmniMoe", Qwen3OmniTower, "code2wav"),
)
