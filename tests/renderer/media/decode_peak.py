"""Decode files in a separate process, and print what each did to the most memory ever used.

The peak is read from /proc, because `ru_maxrss` begins with the parent's memory.
"""

import io
import json
import re
import sys
from pathlib import Path

from PIL import Image

from shared.config.schema import RendererConfig
from shared.errors import RequestError
from workers.renderer.media.image_decoder import decode_image


def peak_kib() -> int:
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmHWM:\s+(\d+)", status)
    assert match is not None
    return int(match[1])


def outcome_of(data: bytes) -> tuple[str, str]:
    try:
        return "ok", str(decode_image(data, RendererConfig(), "field").image.size)
    except RequestError as error:
        return error.code, error.message


def main() -> None:
    for fmt in ("JPEG", "PNG", "WEBP", "GIF"):  # and Pillow loads all of its modules
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, fmt)
        outcome_of(file.getvalue())
    for name in sys.argv[1:]:
        data = Path(name).read_bytes()
        before = peak_kib()
        code, message = outcome_of(data)
        report = {"code": code, "message": message, "growth_kib": peak_kib() - before}
        sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()
