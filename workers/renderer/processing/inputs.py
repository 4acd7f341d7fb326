"""Inputs: the modalities that a model reads, each with its layout and its limits."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from shared.codec.envelope import TensorData
from shared.codec.vllm_kwargs import VideoFacts
from shared.config import ModelConfig
from shared.errors import ConfigError, ContextTooLong, MediaTooLarge
from shared.models.family import ModelFamily
from shared.models.frame_sampling import ASSUMED_FPS
from shared.models.layout import MediaLayout, PlannedLayout
from shared.models.media import DecodedAudio, DecodedImage, DecodedMedia, DecodedVideo, FramePlan
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import AUDIO, IMAGE, VIDEO, FrameSampling, Modality, content_hash


@dataclass(frozen=True, slots=True)
class Input:
    """One modality that the model reads."""

    modality: Modality
    layout: MediaLayout
    placeholder_id: int
    limit: int
    """Largest number of such media in a request."""
    max_frames: int
    max_frames_mib: int

    @property
    def has_text(self) -> bool:
        """Whether there is text among the tokens of an item."""
        return isinstance(self.layout, PlannedLayout) and self.layout.has_text

    def hash(self, source_hash: str, tenant: str, sampling: FrameSampling) -> str:
        """Return the mm_hash of what `process` makes of the file with this hash."""
        parts = [tenant, source_hash, self.layout.fingerprint]
        if self.modality == VIDEO:
            parts.append(to_json(self._bound(sampling)).decode())
        elif self.modality == AUDIO:
            parts.append(sampling.overflow)
        return content_hash(*parts)

    def process(
        self, media: DecodedMedia, sampling: FrameSampling, max_tokens: int, field: str
    ) -> tuple[dict[str, TensorData], int, VideoFacts | None]:
        """Return the fields, the number of embeddings and, of a video, what was sampled.

        Raises a RequestError naming `field`: InvalidMedia, or ContextTooLong, before a video or a
        sound is decoded, for one of more than `max_tokens`.
        """
        layout = self.layout
        if isinstance(media, DecodedImage):
            assert not isinstance(layout, PlannedLayout)
            return *layout.process(media, field), None
        plan, facts = self._plan(media, sampling, max_tokens, field)
        assert isinstance(layout, PlannedLayout)
        return *layout.pack(media.read(plan), plan, field), facts

    def outline(
        self, media: DecodedMedia, sampling: FrameSampling, max_tokens: int, field: str
    ) -> tuple[dict[str, TensorData], int]:
        """Return the metadata and the number of embeddings of `process`.

        No frame of a video is decoded. Raises what `process` raises.
        """
        layout = self.layout
        if isinstance(media, DecodedImage):
            assert not isinstance(layout, PlannedLayout)
            return layout.process(media, field)
        plan, _ = self._plan(media, sampling, max_tokens, field)
        assert isinstance(layout, PlannedLayout)
        return layout.outline(media.read(plan), plan, field)

    def _plan(
        self,
        media: DecodedVideo | DecodedAudio,
        sampling: FrameSampling,
        max_tokens: int,
        field: str,
    ) -> tuple[Any, VideoFacts | None]:
        """Return the layout's plan and, of a video, what is sampled."""
        layout = self.layout
        assert isinstance(layout, PlannedLayout)
        plan = layout.plan(media.probe, self._bound(sampling), field)
        if plan.num_tokens > max_tokens:
            raise ContextTooLong(
                f"the {self.modality}'s {plan.num_tokens} tokens are more than the"
                f" {max(0, max_tokens)} that the rest of the prompt leaves",
                field=field,
            )
        facts = None
        if isinstance(media, DecodedVideo):
            self._check_frames(plan, field)
            probe = media.probe
            fps = (sampling.fps if probe.is_sequence else None) or probe.fps or ASSUMED_FPS
            facts = VideoFacts(probe.num_frames, fps, plan.indexes, probe.is_sequence)
        return plan, facts

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


def open_inputs(
    family: ModelFamily | None, folder: Path, config: Any, model: ModelConfig
) -> dict[Modality, Input]:
    """Open the layouts of a model's modalities. Raises ConfigError."""
    if family is None and getattr(config, "image_token_id", None) is not None:
        raise ConfigError(
            f"{folder}: images are not supported in models of type {config.model_type!r}",
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
            source.placeholder_id(config),
            limits[modality],
            model.max_frames,
            model.max_frames_mib,
        )
    return inputs
