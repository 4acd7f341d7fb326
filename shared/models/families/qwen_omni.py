"""Thinkers of Qwen2.5-Omni and Qwen3-Omni, the parts that write text.

A model's folder also has its talker and its vocoder. Both accept images, sounds and videos. If a
request uses the sound of a video, its item has the fields of a video and of a sound.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedConfig

from shared.codec.arrays import from_numpy, to_numpy
from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import BatchedField, Bounds, FlatField, SharedField, WireField
from shared.errors import InvalidRequest
from shared.models.families.qwen2_audio import AudioTower
from shared.models.families.qwen_vl import (
    QwenAdapter,
    QwenTower,
    check_seconds,
    join_levels,
    levels_for,
)
from shared.models.family import MediaInput, ModelFamily
from shared.models.frames import VideoSettings
from shared.models.language import MediaItem
from shared.models.lazy_module import LazyModule
from shared.models.mel_layout import (
    FRAMES,
    SOUND_FIELDS,
    MelLayout,
    count_chunked_tokens,
    count_tokens,
)
from shared.models.mrope import Run, TimedRun
from shared.models.qwen_geometry import Geometry
from shared.models.qwen_image import QwenImageLayout
from shared.models.qwen_video import GRID, SECONDS, Qwen25VideoLayout
from shared.models.sound_in_video import MergedVideo, SoundingVideo
from shared.models.tower_adapter import Fields, refuse
from shared.models.wire_pixels import tensors_of
from shared.native.choices import KernelSetting
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, Modality, Placement, content_hash

if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = LazyModule("torch")

USE_AUDIO = "use_audio_in_video"
"""Field of vLLM's videos: whether their sound is an additional item."""


class OmniAudioLayout(MelLayout):
    """Qwen2.5-Omni's features. Its encoder accepts sounds of any length."""

    wire_names = ("audio_feature_lengths", "feature_attention_mask", "input_audio_features")

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder, getattr(config, "thinker_config", config).audio_config)

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        num_frames = int(to_numpy(fields["audio_frames"]))
        features = to_numpy(fields["input_features"])[:, :num_frames]
        mask = (np.arange(self.num_window_frames) < num_frames).astype(np.int32)
        every_bin: Bounds = [None, None, None]
        frames: Bounds = [0, num_frames, None]
        return {
            "audio_feature_lengths": WireField(fields["audio_frames"], BatchedField(True)),
            "feature_attention_mask": WireField(from_numpy(mask), BatchedField(True)),
            "input_audio_features": WireField(
                from_numpy(features), FlatField([[every_bin, frames]], dim=1)
            ),
        }

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        tensors = tensors_of(wire, self.wire_names, field)
        length, _, features = (to_numpy(tensor) for tensor in tensors)
        is_number = length.size == 1 and np.issubdtype(length.dtype, np.integer)
        if not is_number or features.shape[-1:] != (int(length.reshape(())),):
            raise InvalidRequest(
                f"audio_feature_lengths is {length.tolist()}, for features {list(features.shape)}",
                field=field,
            )
        return self.shorten(features, features.shape[-1], field)


class Qwen3OmniAudioLayout(OmniAudioLayout):
    """Qwen3-Omni's features, which have no silence after the sound.

    A sound is extended to whole frames, as in vLLM. transformers drops the rest of a frame.
    """

    def __init__(self, folder: Path, config: Any) -> None:
        super().__init__(folder, config)
        self._config = getattr(config, "thinker_config", config)

    def count(self, num_frames: int) -> int:
        # The extractor mirrors half of its window at both ends.
        if num_frames * self._hop_len <= self._extractor.n_fft // 2:
            return 0
        return _count_heard(self._config, num_frames)

    def _padded_len(self, num_frames: int) -> int:
        return num_frames * self._hop_len


class OmniImageLayout(QwenImageLayout):
    """Fields of an image, for both thinkers."""

    sends_values = True


class OmniVideoLayout(Qwen25VideoLayout):
    """Qwen2.5-Omni's fields of a video, with the placement of its sound, if it has one."""

    metadata = (GRID, SECONDS, FRAMES)
    sends_values = True
    sound_layout: type[OmniAudioLayout] = OmniAudioLayout
    sound: OmniAudioLayout

    @classmethod
    def open(cls, folder: Path, config: Any) -> Self | None:
        thinker = getattr(config, "thinker_config", config)
        layout = super().open(folder, thinker)
        if layout is not None:
            layout.sound = cls.sound_layout(folder, thinker)
            layout.fingerprint = content_hash(layout.fingerprint, layout.sound.fingerprint)
        return layout

    def __init__(self, settings: VideoSettings, config: Any) -> None:
        super().__init__(settings, config)
        self._config = config
        self.embed_ids = (config.video_token_id, config.audio_token_id)

    def place(
        self, metadata: Mapping[str, TensorData], encode: Callable[[str], list[int]]
    ) -> Placement | None:
        if FRAMES not in metadata:
            return None
        numbers = {name: to_numpy(tensor) for name, tensor in metadata.items()}
        embeds = _embed_ids(self._config, _sounding(self._config, numbers))
        start, end = self._config.audio_start_token_id, self._config.audio_end_token_id
        return Placement([start, *embeds, end], self.embed_ids)

    def to_wire(self, fields: Mapping[str, TensorData]) -> dict[str, WireField]:
        has_sound = FRAMES in fields
        flag = WireField(from_numpy(np.array(has_sound)), SharedField(1, keep_on_cpu=True))
        wire = dict(sorted({**super().to_wire(fields), USE_AUDIO: flag}.items()))
        # vLLM sends the sound as a separate item, and has no format for one item with both.
        return wire | self.sound.to_wire(fields) if has_sound else wire

    def from_wire(
        self, wire: Mapping[str, WireField], field: str
    ) -> tuple[dict[str, TensorData], int]:
        sound_wire = {name: wire[name] for name in OmniAudioLayout.wire_names if name in wire}
        video_wire = {
            name: wire[name] for name in wire if name not in sound_wire and name != USE_AUDIO
        }
        flag = USE_AUDIO in wire and bool(to_numpy(wire[USE_AUDIO].tensor).any())
        if flag != bool(sound_wire):
            names = ", ".join(wire)
            raise InvalidRequest(f"{USE_AUDIO} is {str(flag).lower()} for {names}", field=field)
        if not sound_wire:
            return super().from_wire(video_wire, field)
        fields, num_seen = super().from_wire(video_wire, field)
        sound, num_heard = self.sound.from_wire(sound_wire, field)
        return fields | sound, num_seen + num_heard

    def _time_names(self) -> tuple[str, ...]:
        return (SECONDS,)

    def _bounds(self, settings: VideoSettings) -> tuple[int, int]:
        # transformers' processor of this family ignores the folder's settings for videos.
        return 128 * 28 * 28, 768 * 28 * 28


class Qwen3OmniVideoLayout(OmniVideoLayout):
    """Qwen3-Omni's fields of a video."""

    sound_layout = Qwen3OmniAudioLayout

    def _bounds(self, settings: VideoSettings) -> tuple[int, int]:
        return 128 * 32 * 32, 768 * 32 * 32


class OmniTower(QwenTower):
    """Vision and audio tower of a thinker."""

    modules = ("model.visual", "model.audio_tower")

    def __init__(self, config: PreTrainedConfig) -> None:
        # `config` is the config of the whole model or of its thinker.
        super().__init__(getattr(config, "thinker_config", config))
        self._audio = self._open_audio()

    def _open_audio(self) -> AudioTower:
        return OmniAudioTower(self._config)

    def optimize_layers(self, model: Any, kernels: KernelSetting = "measured") -> None:
        """Replace nothing: Qwen2.5-Omni has other projections than Qwen2.5-VL."""

    def count(self, fields: Fields) -> int:
        if _is_sound(fields):
            return self._audio.count(fields)
        if not _has_sound(fields):
            return super().count(fields)
        check_seconds(fields)
        return super().count(fields) + self._audio.count(fields)

    def check(self, fields: Fields) -> None:
        if FRAMES in fields:
            self._audio.check(fields)
        if not _is_sound(fields):
            super().check(_without_sound(fields))

    def split(self, fields: Fields, max_count: int) -> list[Fields]:
        if not _has_sound(fields):
            return super().split(fields, max_count)
        sound = {name: fields[name] for name in SOUND_FIELDS}
        return [*super().split(_without_sound(fields), max_count), sound]

    def join(self, fields: Fields, parts: Sequence[Tensor]) -> Tensor:
        joined = super().join(fields, parts)
        if not _has_sound(fields):
            return joined
        order = torch.from_numpy(_sounding(self._config, fields).order())
        return joined[order.to(joined.device)]

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        is_sound = [_is_sound(fields) for fields in batch]
        sounds = [fields for fields in batch if _is_sound(fields)]
        others = [fields for fields in batch if not _is_sound(fields)]
        sound_embeddings = iter(self._audio.encode(model, sounds) if sounds else [])
        other_embeddings = iter(super().encode(model, others) if others else [])
        return [next(sound_embeddings if sound else other_embeddings) for sound in is_sound]

    def samples(self) -> list[Fields]:
        return [*super().samples(), *self._audio.samples()]


class OmniAudioTower(AudioTower):
    """Audio tower of Qwen2.5-Omni's thinker, which attends within chunks of two seconds."""

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        from transformers.models.qwen2_5_omni import modeling_qwen2_5_omni as modeling

        lengths = torch.stack([fields[FRAMES] for fields in batch])
        features = [
            fields["input_features"][:, :length]
            for fields, length in zip(batch, lengths.tolist(), strict=True)
        ]
        tower, device = model.model.audio_tower, model.device
        # Lengths stay on the CPU, or the tower would wait for the device in each layer.
        padded, chunks = modeling.chunk_and_pad_features(
            torch.cat(features, dim=1).to(device), lengths, tower.n_window
        )
        hidden = tower(
            padded_feature=padded,
            chunk_lengths=chunks.to(device),
            valid_indices=modeling.get_valid_indices(chunks).to(device),
            pool_indices=modeling.get_pool_indices(lengths).to(device),
            cu_seqlens=modeling.get_audio_cu_seqlens(chunks),
        ).last_hidden_state
        return list(hidden.split([self.count(fields) for fields in batch]))


class Qwen3OmniAudioTower(AudioTower):
    """Audio tower of Qwen3-Omni's thinker. Its convolutions see chunks of one second."""

    def encode(self, model: Any, batch: Sequence[Fields]) -> list[Tensor]:
        # Sounds in one pass are padded to the longest chunk, which changes their last embeddings.
        return [self._encode_one(model, fields) for fields in batch]

    def _encode_one(self, model: Any, fields: Fields) -> Tensor:
        from transformers.models.qwen3_omni_moe import modeling_qwen3_omni_moe as modeling

        lengths = fields[FRAMES][None]
        features = fields["input_features"][:, : int(lengths)].to(model.device)
        tower = model.model.audio_tower
        # Lengths stay on the CPU, or the tower would wait for the device in each layer.
        padded, chunks = modeling.chunk_and_pad_features(features, lengths, tower.n_window)
        hidden: Tensor = tower(
            padded_feature=padded,
            chunk_lengths=chunks,
            valid_indices=modeling.get_valid_indices(chunks, tower.n_window).to(model.device),
            feature_lens=lengths,
        ).last_hidden_state
        # A sound has no features of earlier layers (DeepStack).
        num_levels = len(self._config.vision_config.deepstack_visual_indexes)
        return torch.nn.functional.pad(hidden, (0, num_levels * hidden.shape[1]))

    def _count_tokens(self, num_frames: int) -> int:
        return _count_heard(self._config, num_frames)


def _is_sound(fields: Mapping[str, Any]) -> bool:
    return FRAMES in fields and GRID not in fields


def _has_sound(fields: Mapping[str, Any]) -> bool:
    """Return whether the item is a video with its sound."""
    return FRAMES in fields and GRID in fields


def _without_sound(fields: Fields) -> Fields:
    return {name: value for name, value in fields.items() if name not in SOUND_FIELDS}


def _is_third(config: Any) -> bool:
    """Return whether the config belongs to Qwen3-Omni."""
    return bool(config.model_type.startswith("qwen3"))


def _count_heard(config: Any, num_frames: int) -> int:
    """Return the number of embeddings of a sound."""
    if not _is_third(config):
        return count_tokens(num_frames)
    return count_chunked_tokens(num_frames, 2 * config.audio_config.n_window)


def _times(config: Any, fields: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return the positions of the frames of Qwen3-Omni's video, computed as in transformers."""
    indexes = np.arange(int(fields[GRID][0]), dtype=np.float32)
    return indexes * np.float32(fields[SECONDS]) * np.float32(config.position_id_per_seconds)


def _sounding(
    config: Any, fields: Mapping[str, Any], offset: int = 0
) -> SoundingVideo | MergedVideo:
    """Return the arrangement of the item's embeddings in the prompt."""
    frames, height, width = fields[GRID].tolist()
    merge = config.vision_config.spatial_merge_size
    rate = config.position_id_per_seconds
    num_heard = _count_heard(config, int(fields[FRAMES]))
    if _is_third(config):
        times = _times(config, fields)
        return MergedVideo(times, height // merge, width // merge, num_heard, offset)
    return SoundingVideo(
        frames,
        height // merge,
        width // merge,
        step=float(fields[SECONDS]) * float(rate),
        num_heard=num_heard,
        chunk_len=int(rate * config.seconds_per_chunk),
        offset=offset,
    )


def _embed_ids(config: Any, video: SoundingVideo | MergedVideo) -> list[int]:
    """Return the placeholder tokens of a video and its sound, in order."""
    is_seen = video.order() < video.num_seen
    ids: list[int] = np.where(is_seen, config.video_token_id, config.audio_token_id).tolist()
    return ids


class Qwen3OmniTower(OmniTower):
    """Qwen3-Omni's tower: each embedding is followed by features of earlier layers (DeepStack)."""

    def __init__(self, config: PreTrainedConfig) -> None:
        super().__init__(config)
        self.num_levels = len(self._config.vision_config.deepstack_visual_indexes)

    def _open_audio(self) -> AudioTower:
        return Qwen3OmniAudioTower(self._config)

    def _embed(
        self, model: Any, pixel_values: Tensor, grids: Tensor, geometry: Geometry
    ) -> list[Tensor]:
        return join_levels(model.get_image_features(pixel_values, grids, **geometry))


class ThinkerAdapter(QwenAdapter):
    """A thinker. Its forward cannot select rows, so decoder and head are called separately."""

    def forward(
        self,
        embeddings: Tensor,
        positions: Tensor,
        sampled_rows: Tensor,
        deepstack: Tensor | None,
        **attention: Any,
    ) -> Tensor:
        model: Any = self.model
        hidden = self.hidden_states(embeddings, positions, deepstack, **attention)
        logits: Tensor = model.lm_head(hidden[:, sampled_rows])
        return logits

    def hidden_states(
        self, embeddings: Tensor, positions: Tensor, deepstack: Tensor | None, **attention: Any
    ) -> Tensor:
        """Return the output of the decoder, with the same arguments as `forward`."""
        if deepstack is not None:
            attention["deepstack_visual_embeds"] = levels_for(self.decoder, deepstack)
        hidden: Tensor = self.decoder(
            inputs_embeds=embeddings, position_ids=positions[:, None], use_cache=False, **attention
        ).last_hidden_state
        return hidden

    @property
    def decoder(self) -> Any:
        model: Any = self.model
        return model.model.language_model

    def _runs_of(self, item: MediaItem) -> Sequence[Run]:
        if not _has_sound(item.fields):
            return super()._runs_of(item)
        return [_sounding(self.model.config, item.fields, item.placeholder.offset)]

    def _embed_ids(self, item: MediaItem, count: int) -> Sequence[int]:
        if not _has_sound(item.fields):
            return super()._embed_ids(item, count)
        config: Any = self.model.config
        return _embed_ids(config, _sounding(config, item.fields))

    def _check_placement(self, item: MediaItem) -> None:
        if not _has_sound(item.fields):
            super()._check_placement(item)
        elif item.placeholder.embed_indexes() != list(range(1, item.placeholder.length - 1)):
            refuse("a video with its sound is one run of tokens between two marks")


class Qwen3ThinkerAdapter(ThinkerAdapter):
    """Qwen3-Omni's thinker, which does not round the times of frames to whole positions."""

    position_type = "float32"

    def _runs_of(self, item: MediaItem) -> Sequence[Run]:
        if GRID not in item.fields or _has_sound(item.fields):
            return super()._runs_of(item)
        _, rows, columns = self._grid_of(item)
        times = _times(self.model.config, item.fields)
        return [TimedRun(item.placeholder.offset, times, rows, columns)]


def _media(
    suffix: str, sound: type[OmniAudioLayout], video: type[OmniVideoLayout]
) -> Mapping[Modality, MediaInput]:
    return {
        IMAGE: MediaInput(OmniImageLayout, placeholder=f"image_token_{suffix}"),
        AUDIO: MediaInput(sound, placeholder=f"audio_token_{suffix}"),
        VIDEO: MediaInput(video.open, placeholder=f"video_token_{suffix}"),
    }


FAMILIES: Sequence[ModelFamily] = (
    ModelFamily(
        "Qwen2.5-Omni",
        frozenset({"qwen2_5_omni", "qwen2_5_omni_thinker"}),
        media=_media("index", OmniAudioLayout, OmniVideoLayout),
        tower=OmniTower,
        language=ThinkerAdapter,
        vocoder="token2wav",
        talker="thinker_states",
        model_class="Qwen2_5OmniThinkerForConditionalGeneration",
    ),
    ModelFamily(
        "Qwen3-Omni",
        frozenset({"qwen3_omni_moe", "qwen3_omni_moe_thinker"}),
        media=_media("id", Qwen3OmniAudioLayout, Qwen3OmniVideoLayout),
        tower=Qwen3OmniTower,
        language=Qwen3ThinkerAdapter,
        vocoder="code2wav",
        talker="code_predictor",
        model_class="Qwen3OmniMoeThinkerForConditionalGeneration",
    ),
)
