"""Frames of videos: their size, their arithmetic and the settings of transformers' processors.

These processors need torchvision. It computes torch's bicubic interpolation of 8-bit values, and
one subtraction and division for each channel. Single frames give the same bits as a whole video.
Images are resized by Pillow, which differs in some values by 1.
"""

from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from shared.errors import ConfigError
from shared.helpers.validation import reason_of
from shared.models.media import Frame, FramePlan
from shared.models.resizing import resize_bicubic

# Part of the fingerprint of a video layout that identifies the resizing of frames.
RESIZING = "torch bicubic antialias"


class VideoSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a video processor that affect its output, with the classes' defaults."""

    size: dict[str, int] = {}
    crop_size: dict[str, int] = {}
    min_pixels: int | None = None
    max_pixels: int | None = None
    patch_size: int = 14
    temporal_patch_size: int = 2
    merge_size: int = 2
    image_mean: tuple[float, float, float] = (0.48145466, 0.4578275, 0.40821073)
    image_std: tuple[float, float, float] = (0.26862954, 0.26130258, 0.27577711)
    rescale_factor: float = 1 / 255
    resample: Literal[3] = 3
    do_resize: Literal[True] = True
    do_rescale: Literal[True] = True
    do_normalize: Literal[True] = True
    do_center_crop: bool | None = None
    fps: float | None = None
    num_frames: int | None = None
    min_frames: int = 4
    max_frames: int = 768
    cap_pixels_per_frame: bool | None = None
    max_video_tokens: int | None = None


def read_video_settings(folder: Path, **defaults: Any) -> VideoSettings | None:
    """Read the settings of a model folder; `defaults` are the defaults of the processor's class.

    Without a file about videos, the settings of images are used. Returns None if videos are not
    supported with these. Raises ConfigError for unsupported settings about videos.
    """
    for name, key in (
        ("processor_config.json", "video_processor"),
        ("video_preprocessor_config.json", None),
        ("preprocessor_config.json", None),
    ):
        file = folder / name
        try:
            section: Any = msgspec.json.decode(file.read_bytes()) if file.is_file() else None
            if key is not None:
                section = (section or {}).get(key)
            if section is not None:
                settings = {name: value for name, value in section.items() if value is not None}
                return msgspec.convert(defaults | settings, VideoSettings)
        except (OSError, AttributeError, msgspec.MsgspecError) as error:
            if name != "preprocessor_config.json":
                raise ConfigError(
                    f"{file}: no video settings: {reason_of(error)}", field="path"
                ) from error
    return None


def fused_table(settings: VideoSettings) -> NDArray[np.float32]:  # [channels, 256]
    """Return the normalised value of every pixel value, as transformers' torch backend computes it.

    Mean and deviation are scaled once, so the values differ from the values of images in their last
    bits.
    """
    scale = np.float32(1.0 / settings.rescale_factor)
    mean, std = (
        np.array(values, np.float32)[:, None] * scale
        for values in (settings.image_mean, settings.image_std)
    )
    values: NDArray[np.float32] = (np.arange(256, dtype=np.float32)[None] - mean) / std
    return values


def resize_frame(frame: NDArray[np.uint8], plan: FramePlan) -> Frame:
    """Return an RGB frame [height, width, 3] in the planned size, [3, height, width]."""
    resized = resize_bicubic(frame, plan.height, plan.width)
    if plan.crop is None:
        return resized
    top, left = (plan.height - plan.crop) // 2, (plan.width - plan.crop) // 2
    return resized[:, top : top + plan.crop, left : left + plan.crop]
