"""Image decoder: from the URL or the bytes of a file to an RGB raster.

All functions block; the worker calls them in its thread pool.
"""

from shared.config.schema import RendererConfig
from shared.decoding.image_reader import check_num_bytes, read_image
from shared.decoding.pictures import to_rgb
from shared.errors import InvalidMedia
from shared.helpers.base64_text import decode_base64
from shared.models.media import DecodedImage
from shared.protocol.multimodal import IMAGE, VIDEO, FileKind, content_hash
from shared.protocol.requests import SEQUENCE_HEAD


def hash_source(data: bytes) -> str:
    """Return the hash of a file's bytes, which identifies an image before it is decoded.

    Everything that changes the raster changes the file: mode, size, palette, orientation,
    transparency.
    """
    return content_hash(data)


def decode_data_url(url: str, limits: RendererConfig, field: str, kind: FileKind = IMAGE) -> bytes:
    """Return the bytes of `data:[<type>];base64,<base64>`; the declared type is ignored.

    A sequence of JPEG files is returned undecoded, because only the commas in the URL separate the
    files. Raises InvalidMedia, and MediaTooLarge before anything is decoded.
    """
    header, comma, payload = url.partition(",")
    if not comma or not header[:5].lower() == "data:" or not header.lower().endswith(";base64"):
        raise InvalidMedia("expected data:<type>;base64,<data>", field=field)
    check_num_bytes(len(payload) // 4 * 3 - 2, limits, field, kind)
    if kind == VIDEO and header.lower().encode() + b"," == SEQUENCE_HEAD:
        return SEQUENCE_HEAD + payload.encode()
    try:
        return decode_base64(payload)
    except ValueError:
        raise InvalidMedia("the base64 of the data: URL is not valid", field=field) from None


def decode_image(data: bytes, limits: RendererConfig, field: str) -> DecodedImage:
    """Decode a still JPEG, PNG, WEBP or GIF to RGB.

    The image is turned upright by its EXIF orientation, transparent pixels are laid over white,
    and 16-bit grey keeps its upper 8 bits. Raises MediaTooLarge from the header alone, and
    InvalidMedia for any other fault.
    """
    return DecodedImage(read_image(data, limits, field, to_rgb), hash_source(data))
