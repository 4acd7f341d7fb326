"""Qwen2-Audio: sounds of at most 30 seconds as log-mel features for a Whisper encoder.

This module also has the parts of the audio tower that other families share.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, WireField
from shared.errors import ConfigError, InvalidRequest
from shared.models.family import MediaInput, ModelFamily
from shared.models.language import LanguageAdapter
from shared.models.lazy_module import LazyModule
from shared.models.mel_layout import NUM_FRAMES_BEHIND, MelLayout, count_tokens
from shared.models.tower_adapter import Fields, TowerAdapter, get_field, refuse
from shared.models.wire_pixels import tensors_of
from shared.protocol.multimodal import AUDIO

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

NUM_SAMPLE_FRAMES = 100
"""Number of frames in the sound of the warm-up."""


class Qwen2AudioLayout(MelLayout):
    """Qwen2-Audio's features. Its encoder needs twice as many frames as it has positions."""

    def __init__(self, folder: Path, config: Any) -> None:
        audio = getattr(config, "audio_config", config)
        super().__init__(folder, audio)
        num_frames = 2 * audio.max_source_positions
        if self.num_window_frames != num_frames:
            raise ConfigError(
                f"{folder}: the feature extractor returns {self.num_window_frames} frames, but the"
                f" audio tower needs {num_frames}",
                field="path",
            )

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        features, num_frames = self.restore(fields)
        mask = (np.arange(len(features[0])) < num_frames).astype(np.int32)
        return {
            "feature_attention_mask": WireField(from_numpy(mask), BatchedField()),
            "input_features": WireField(from_numpy(features), BatchedField()),
        }

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        names = ("feature_attention_mask", "input_features")
        mask, features = (to_numpy(tensor) for tensor in tensors_of(wire, names, field))
        num_frames = int(np.count_nonzero(mask))
        fits = mask.ndim == 1 and features.shape[-1:] == mask.shape
        if not fits or not mask[:num_frames].all():
            raise InvalidRequest(
                f"feature_attention_mask {list(mask.shape)} does not match the features"
                f" {list(features.shape)}",
                field=field,
            )
        return self.shorten(features, num_frames, field)


class AudioTower(TowerAdapter):
    """An audio tower, for the fields of `MelLayout`."""

    modules: tuple[str, ...] = ("model.audio_tower",)
    metadata = ("audio_frames",)

    @property
    def _audio_config(self) -> Any:
        """Config of the encoder, which may be a part of the model's config."""
        return getattr(self._config, "audio_config", self._config)

    def count(self, fields: Fields) -> int:
        num_frames = int(get_field(fields, "audio_frames", torch.int64, ()))
        if (count := self._count_tokens(num_frames)) < 1:
            refuse(f"audio_frames is {num_frames}, which is too short for an embedding")
        return count

    def _count_tokens(self, num_frames: int) -> int:
        return count_tokens(num_frames)

    def check(self, fields: Fields) -> None:
        num_bins = self._audio_config.num_mel_bins
        features = get_field(fields, "input_features", torch.float32, (num_bins, -1))
        self.count(fields)
        num_behind = features.shape[1] - int(fields["audio_frames"])
        if not 0 <= num_behind <= NUM_FRAMES_BEHIND:
            refuse(
                f"input_features has {features.shape[1]} frames for a sound of"
                f" {int(fields['audio_frames'])}"
            )
        if not bool(features.isfinite().all()):
            refuse("input_features holds values that are not finite")

    def sample(self) -> Fields:
        return {
            "input_features": torch.zeros(self._audio_config.num_mel_bins, NUM_SAMPLE_FRAMES),
            "audio_frames": torch.tensor(NUM_SAMPLE_FRAMES),
        }


class Qwen2AudioTower(AudioTower):
    """A Whisper encoder over a whole window of frames, with a projector."""

    modules: tuple[str, ...] = ("model.audio_tower", "model.multi_modal_projector")

    def check(self, fields: Fields) -> None:
        super().check(fields)
        num_frames = fields["input_features"].shape[1]
        if num_frames > self._num_window_frames:
            refuse(
                f"input_features has {num_frames} frames, over the limit of"
                f" {self._num_window_frames}"
            )

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        from transformers.masking_utils import create_bidirectional_mask

        features = torch.stack([self.restore(fields) for fields in batch])
        features = features.to(model.device, model.dtype)
        frames = torch.stack([fields["audio_frames"] for fields in batch])
        tower = model.model.audio_tower
        # Two positions become one embedding.
        num_positions, counts = tower._get_feat_extract_output_lengths(frames)
        positions = torch.arange(self._num_window_frames // 2, device=model.device)
        mask = create_bidirectional_mask(
            config=tower.config,
            inputs_embeds=features.new_zeros(len(batch), len(positions), 1),
            attention_mask=(positions < num_positions.to(model.device)[:, None]).long(),
        )
        hidden = tower(features, attention_mask=mask).last_hidden_state
        embeddings = model.model.multi_modal_projector(hidden)
        return [rows[:count] for rows, count in zip(embeddings, counts.tolist(), strict=True)]

    def restore(self, fields: Fields) -> Tensor:
        """Return the features of the whole window, bit for bit: [num_bins, num_window_frames]."""
        features = fields["input_features"]
        num_behind = self._num_window_frames - features.shape[1]
        return torch.nn.functional.pad(features[None], (0, num_behind), mode="replicate")[0]

    @property
    def _num_window_frames(self) -> int:
        return 2 * int(self._audio_config.max_source_positions)


class Qwen2AudioAdapter(LanguageAdapter):
    """A plain decoder. Its model's forward cannot select rows, so the head is called here."""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        assert deepstack is None, "this family has no further levels of features"
        model: Any = self.model
        decoder: Any = self.decoder
        hidden = decoder(
            inputs_embeds=embeddings, position_ids=positions, use_cache=False, **attention
        ).last_hidden_state
        logits: Tensor = model.lm_head(hidden[:, sampled_rows])
        return logits

    @property
    def decoder(self) -> Any:
        model: Any = self.model
        return model.model.language_model


FAMILIES = (
    ModelFamily(
        "Qwen2-Audio",
        frozenset({"qwen2_audio"}),
        media={AUDIO: MediaInput(Qwen2AudioLayout, placeholder="audio_token_id")},
        tower=Qwen2AudioTower,
        language=Qwen2AudioAdapter,
        model_class="Qwen2AudioForConditionalGeneration",
    ),
)
