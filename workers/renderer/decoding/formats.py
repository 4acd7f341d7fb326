"""Selection of a reader by a file's first bytes. File names and declared types are not trusted."""

from contextlib import suppress
from importlib.util import find_spec

from soundfile import LibsndfileError

from shared.decoding.refusal import Refusal
from workers.renderer.decoding import image_video, sound_file
from workers.renderer.decoding.animations import is_animation
from workers.renderer.decoding.audio_file import AudioFile
from workers.renderer.decoding.containers import ADTS, Bytes, find_container, sound_containers
from workers.renderer.decoding.messages import DecodingLimits
from workers.renderer.decoding.video_file import VideoFile

HAS_PYAV = find_spec("av") is not None
if HAS_PYAV:
    from av.error import FFmpegError

    from workers.renderer.decoding.packet_audio import PacketAudio
    from workers.renderer.decoding.packet_video import PacketVideo

VIDEOS = "MP4, MOV, WebM, Matroska, AVI, animated GIF, WebP or PNG"
SOUNDS = "WAV, FLAC, OGG, MP3, AAC, or the sound of MP4, MOV, WebM, Matroska or AVI"


def open_video(data: Bytes, limits: DecodingLimits) -> VideoFile:
    if bytes(data[: len(image_video.SEQUENCE_HEAD)]) == image_video.SEQUENCE_HEAD:
        return image_video.JpegSequence(data, limits)
    if is_animation(bytes(data[:12])):
        return image_video.AnimatedImage(data, limits)
    container = find_container(data)
    if container is None or container is ADTS:
        raise Refusal("invalid", f"not a readable video; send {VIDEOS}")
    if not HAS_PYAV:
        raise _lacks_extra(container.title)
    return PacketVideo(data, container, limits)


def open_audio(data: Bytes, descriptor: int, limits: DecodingLimits) -> AudioFile:
    """Open a sound; `data` is a mapping of the file `descriptor`."""
    if sound_file.is_sound(data):
        return _open_sound(data, descriptor, limits)
    container = find_container(data)
    if container is None:
        raise Refusal("invalid", f"not a readable sound; send {SOUNDS}")
    if not HAS_PYAV:
        raise _lacks_extra(container.title)
    return PacketAudio(data, container, limits)


def _open_sound(data: Bytes, descriptor: int, limits: DecodingLimits) -> AudioFile:
    """Open a sound by libsndfile, or else by PyAV. Raises the error of libsndfile."""
    try:
        return sound_file.SoundFile(data, descriptor, limits)
    except (LibsndfileError, Refusal) as error:
        if isinstance(error, Refusal) and error.fault != "unsupported":
            raise
        for container in sound_containers(data) if HAS_PYAV else ():
            with suppress(Refusal, FFmpegError):
                return PacketAudio(data, container, limits)
        raise


def _lacks_extra(title: str) -> Refusal:
    return Refusal(
        "unsupported",
        f"{title} is not accepted here, because the extra pagemill[video] is not installed: run"
        " `pip install av` in the environment of Pagemill, and restart `pagemill up`",
    )
