"""Inputs: the modalities that a model accepts, each with its layout and its limits."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import VideoFacts
from shared.config.schema import ModelConfig
from shared.errors import ConfigError, ContextTooLong, MediaTooLarge
from shared.models.family import ModelFamily
from shared.models.frame_sampling import ASSUMED_FPS
from shared.models.generic_hearing import find_obstacle
from shared.models.layout import MediaLayout, PlannedLayout
from shared.models.media import (
    DecodedAudio,
    DecodedImage,
    DecodedMedia,
    DecodedVideo,
    FramePlan,
    VideoProbe,
)
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, FrameSampling, Modality, content_hash


@dataclass(frozen=True, slots=True)
class Input:
    """One modality that the model accepts."""

    modality: Modality
    layout: MediaLayout
    placeholder_id: int
    limit: int
    """Largest number of such media in a request."""
    max_frames: int
    max_frames_mib: int

    @property
    def hears_videos(self) -> bool:
        """Whether the sound of a video can be a part of its item."""
        return isinstance(self.layout, PlannedLayout) and self.layout.sound is not None

    def hash(self, source_hash: str, tenant: str, sampling: FrameSampling) -> str:
        """Return the mm_hash of the result of `process` for the file with this hash."""
        parts = [tenant, source_hash, self.layout.fingerprint]
        if self.modality == VIDEO:
            parts.append(to_json(self._bound(sampling)).decode())
        elif self.modality == AUDIO:
            parts.append(sampling.overflow)
        elif sampling.page is not None:
            parts.append(to_json(sampling.page).decode())
        return content_hash(*parts)

    def process(
        self, media: DecodedMedia, sampling: FrameSampling, max_tokens: int, field: str
    ) -> tuple[dict[str, TensorData], int, VideoFacts | None]:
        """Return the fields, the number of embeddings and, for a video, the sampled frames.

        Raises a RequestError that names `field`: InvalidMedia, or ContextTooLong for a video or a
        sound of more than `max_tokens`, before it is decoded.
        """
        layout = self.layout
        if isinstance(media, DecodedImage):
            assert not isinstance(layout, PlannedLayout)
            return *layout.process(media, field), None
        parts, facts = self._plan(media, sampling, max_tokens, field)
        return *_join(p.layout.pack(p.read(p.plan), p.plan, field) for p in parts), facts

    def outline(
        self, media: DecodedMedia, sampling: FrameSampling, max_tokens: int, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the metadata and the number of embeddings of `process`.

        No frame of a video is decoded. Raises the errors of `process`.
        """
        layout = self.layout
        if isinstance(media, DecodedImage):
            assert not isinstance(layout, PlannedLayout)
            return layout.process(media, field)
        parts, _ = self._plan(media, sampling, max_tokens, field)
        return _join(p.layout.outline(p.read(p.plan), p.plan, field) for p in parts)

    def _plan(
        self,
        media: DecodedVideo | DecodedAudio,
        sampling: FrameSampling,
        max_tokens: int,
        field: str,
    ) -> "tuple[list[_Part], VideoFacts | None]":
        """Return the planned parts of the media and, for a video, the sampled frames."""
        layout = self.layout
        assert isinstance(layout, PlannedLayout)
        sampling = self._bound(sampling)
        parts = [_Part(layout, layout.plan(media.probe, sampling, field), media.read)]
        sound = media.sound if isinstance(media, DecodedVideo) else None
        if sound is not None and layout.sound is not None:
            plan = layout.sound.plan(sound.probe, sampling, field)
            parts.append(_Part(layout.sound, plan, sound.read))
        num_tokens = sum(part.plan.num_tokens for part in parts)
        if num_tokens > max_tokens:
            raise ContextTooLong(
                f"the {self.modality}'s {num_tokens} tokens are more than the"
                f" {max(0, max_tokens)} that the rest of the prompt leaves",
                field=field,
            )
        facts = None
        if isinstance(media, DecodedVideo):
            facts = self._sampled(media.probe, parts[0].plan, sampling, field)
        return parts, facts

    def _sampled(
        self, probe: VideoProbe, plan: FramePlan, sampling: FrameSampling, field: str
    ) -> VideoFacts:
        """Return the sampled frames. Raises MediaTooLarge."""
        self._check_frames(plan, field)
        fps = (sampling.fps if probe.is_sequence else None) or probe.fps or ASSUMED_FPS
        return VideoFacts(
            probe.num_frames, fps, plan.indexes, probe.is_sequence, sampling.use_audio
        )

    def _check_frames(self, plan: FramePlan, field: str) -> None:
        if plan.num_bytes > self.max_frames_mib * 2**20:
            raise MediaTooLarge(
                f"{len(plan.indexes)} frames of {plan.width} x {plan.height} have"
                f" {plan.num_bytes} bytes, over the limit of {self.max_frames_mib} MiB",
                field=field,
            )

    def _bound(self, sampling: FrameSampling) -> FrameSampling:
        limit = min(sampling.max_frames or self.max_frames, self.max_frames)
        return msgspec.structs.replace(sampling, max_frames=limit)


@dataclass(frozen=True, slots=True)
class _Part:
    """Part of an item with one modality: a video may have a sound."""

    layout: PlannedLayout[Any, Any, Any]
    plan: Any
    read: Callable[[Any], Iterator[Any]]


def _join(
    parts: Iterable[tuple[dict[str, TensorData], int]],
) -> tuple[dict[str, TensorData], int]:
    """Return the fields of all parts, and the number of their embeddings."""
    fields: dict[str, TensorData] = {}
    num_tokens = 0
    for own, num in parts:
        fields |= own
        num_tokens += num
    return fields, num_tokens


def open_inputs(
    family: ModelFamily | None, folder: Path, config: Any, model: ModelConfig
) -> dict[Modality, Input]:
    """Open the layouts of a model's modalities. Raises ConfigError."""
    if family is None and getattr(config, "image_token_id", None) is not None:
        raise ConfigError(
            f"{folder}: images are not supported in models of type {config.model_type!r}:"
            f" {find_obstacle(config.model_type)}",
            field="path",
        )
    limits = {IMAGE: model.max_images, VIDEO: model.max_videos, AUDIO: model.max_audios}
    media = {} if family is None else family.media
    inputs = {}
    for modality, source in media.items():
        layout = source.open_layout(folder, config)
        if layout is None:
            continue
        inputs[modality] = Input(
            modality,
            layout,
            source.placeholder_id(config) if layout.marker_id is None else layout.marker_id,
            limits[modality],
            model.max_frames,
            model.max_frames_mib,
        )
    return inputs
