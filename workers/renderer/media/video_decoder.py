"""Video decoder: from a file's bytes to frames of the planned size.

A decoder process yields whole frames one at a time, in memory that it shares with the renderer.
They are resized here, with the arithmetic of the model's family. Another process reads the sound,
if the request uses it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from shared.models.frames import resize_frame
from shared.models.media import DecodedVideo, Frame, FramePlan, VideoProbe
from shared.protocol.multimodal import VIDEO, content_hash
from workers.renderer.media.audio_decoder import probe_sound
from workers.renderer.media.image_decoder import check_num_bytes
from workers.renderer.media.tools import MediaTools

SEQUENCE_FPS = 1.0


@contextmanager
def decode_video(data: bytes, tools: MediaTools, field: str) -> Iterator[DecodedVideo]:
    """Probe a video. Raises UnsupportedContent, InvalidMedia or MediaTooLarge."""
    check_num_bytes(len(data), tools.config, field, VIDEO)
    source_hash = content_hash(data)
    with ExitStack() as opened:
        decoding = opened.enter_context(
            tools.pool.open("frames", data, source_hash, field, tools.use)
        )
        file = decoding.probe_video()
        fps = SEQUENCE_FPS if file.is_sequence else file.fps
        probe = VideoProbe(file.num_frames, fps, file.width, file.height, file.is_sequence)

        def read(plan: FramePlan) -> Iterator[Frame]:
            return (resize_frame(frame, plan) for frame in decoding.read_frames(plan.indexes))

        sound = None
        if tools.sampling.use_audio and file.has_sound:
            samples = tools.pool.join("samples", data, source_hash, field, tools.use)
            sound = probe_sound(opened.enter_context(samples), source_hash)
        yield DecodedVideo(probe, read, source_hash, sound)
