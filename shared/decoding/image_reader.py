"""Image reader: from a file's bytes to an upright raster.

Every byte comes from an untrusted client. Pillow's messages are not sent to clients, because they
contain memory addresses, and no raster is allocated before the header's sizes are checked. All
functions block.
"""

import io
import warnings
from collections.abc import Callable

from PIL import Image

from shared.config.schema import RendererConfig
from shared.decoding.pictures import to_upright
from shared.decoding.refusal import Refusal
from shared.decoding.still_image import read_still_image
from shared.errors import InvalidMedia, MediaTooLarge, RequestError
from shared.protocol.multimodal import IMAGE, FileKind

FORMATS = ("JPEG", "PNG", "WEBP", "GIF")
# Formats that are named in errors, by magic number. Pillow's readers of `FORMATS` decide what is
# accepted.
_MAGIC = (
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"%PDF", "PDF"),
    (b"%!PS", "PostScript"),
    (b"8BPS", "Photoshop"),
    (b"SIMPLE", "FITS"),
    (b"icns", "ICNS"),
    (b"\0\0\1\0", "ICO"),
    (b"\0\0\0\x0cjP", "JPEG 2000"),
    (b"\0\0\0\x0cJXL", "JPEG XL"),
    (b"<svg", "SVG"),
    (b"<?xml", "XML"),
    (b"\x1aE\xdf\xa3", "Matroska or WebM"),
)

# Pillow only warns about an image over its pixel limit. The limit here is checked on the header's
# sizes, and its error names them.
Image.MAX_IMAGE_PIXELS = None
# Filters cannot be set per call, because they belong to the process and not to the thread. Pillow
# warns about damage to the file, such as a broken EXIF block, so a warning counts as an error.
warnings.filterwarnings("error", module=r"PIL\.")


def read_image(
    data: bytes,
    limits: RendererConfig,
    field: str,
    convert: Callable[[Image.Image], Image.Image],
) -> Image.Image:
    """Decode a still image, turned upright by its EXIF orientation, and convert it.

    Raises MediaTooLarge from the header alone, and InvalidMedia for any other fault.
    """
    check_num_bytes(len(data), limits, field)
    try:
        still = read_still_image(data)
        if still is None:
            raise _other_format(data, field)
        image = Image.open(io.BytesIO(still.file), formats=FORMATS)
        check_size(image.size, limits, field)
        still.check_scans(image.size)
        return convert(to_upright(image, still.orientation))
    except RequestError:
        raise
    except Refusal as refusal:
        raise InvalidMedia(str(refusal), field=field) from None
    except Exception:  # the decoders raise nearly every type on hostile bytes
        raise InvalidMedia("the image is damaged or incomplete", field=field) from None


def _other_format(data: bytes, field: str) -> InvalidMedia:
    name = _name_format(data)
    if name is None:
        return InvalidMedia("not a readable GIF, JPEG, PNG or WEBP image", field=field)
    if name == "PDF":
        return InvalidMedia(
            "PDF is not an image; send GIF, JPEG, PNG or WEBP, or send it as a document",
            field=field,
        )
    return InvalidMedia(f"{name} is not accepted; send GIF, JPEG, PNG or WEBP", field=field)


def _name_format(data: bytes) -> str | None:
    if data[4:8] == b"ftyp":
        return "ISO media (HEIC, AVIF or MP4)"
    return next((name for magic, name in _MAGIC if data.startswith(magic)), None)


def check_num_bytes(
    num_bytes: int, limits: RendererConfig, field: str, kind: FileKind = IMAGE
) -> None:
    """Raise InvalidMedia for an empty file, MediaTooLarge for one over the limit of its kind."""
    if not num_bytes:
        raise InvalidMedia(f"the {kind}'s file is empty", field=field)
    limit = limits.max_bytes[kind]
    if num_bytes > limit:
        raise MediaTooLarge(
            f"the {kind}'s {num_bytes} bytes are over the limit of {limit} bytes",
            field=field,
        )


def check_size(size: tuple[int, int], limits: RendererConfig, field: str) -> None:
    """Raise InvalidMedia or MediaTooLarge for an image or a frame of this width and height."""
    width, height = size
    if width < 1 or height < 1:
        raise InvalidMedia(f"an image of {width} x {height} pixels is empty", field=field)
    if max(size) > limits.max_image_side:
        raise MediaTooLarge(
            f"an image of {width} x {height} is over the limit of {limits.max_image_side} pixels"
            " a side",
            field=field,
        )
    if width * height > limits.max_image_pixels:
        raise MediaTooLarge(
            f"an image of {width} x {height} = {width * height} pixels is over the limit of"
            f" {limits.max_image_pixels} pixels",
            field=field,
        )
