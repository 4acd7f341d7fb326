"""PyAV and transformers' video processor, measured in a separate process.

python -m ops.bench.media.transformers_video FOLDER NUM_FRAMES CLIP COUNT

The processor needs torchvision, and transformers looks for that when it is imported. PyPI has
builds of it for torch with CUDA alone. With torch for CPUs, such a build loads only if two of its
operators are declared first. The processor uses neither of them.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

OPERATORS = ("nms", "qnms")
FRAMES_PER_SECOND = 30.0


def _declare_operators() -> Any:
    import torch

    library = torch.library.Library("torchvision", "DEF")
    for name in OPERATORS:
        library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    # The declarations end with it.
    return library


def _open_processor(folder: Path, num_frames: int) -> Callable[[bytes], str]:
    import io

    import av
    import numpy as np
    from transformers import AutoVideoProcessor
    from transformers.video_utils import VideoMetadata

    processor: Any = AutoVideoProcessor.from_pretrained(folder, local_files_only=True)

    def process(data: bytes) -> str:
        with av.open(io.BytesIO(data), "r") as opened:
            total = opened.streams.video[0].frames
            numbers = set(np.linspace(0, total - 1, num_frames).astype(int).tolist())
            frames = [
                frame.to_ndarray(format="rgb24")
                for number, frame in enumerate(opened.decode(video=0))
                if number in numbers
            ]
        metadata = VideoMetadata(total_num_frames=total, fps=FRAMES_PER_SECOND)
        output = processor(
            videos=[np.stack(frames)],
            video_metadata=[metadata],
            do_sample_frames=False,
            return_tensors="pt",
        )
        return f"{int(output['video_grid_thw'].prod()) // processor.merge_size**2} tokens"

    return process


def main(folder: str, num_frames: str, clip: str, count: str) -> int:
    import torch

    torch.set_num_threads(1)
    library = _declare_operators()
    # These import transformers, which imports torchvision where it finds it.
    from ops.bench.media.clips import renamed
    from ops.bench.media.fields import measure

    process = _open_processor(Path(folder), int(num_frames))
    data = Path(clip).read_bytes()
    timing = measure(process, [renamed(data) for _ in range(int(count) + 1)], None)
    del library
    sys.stdout.write(json.dumps(asdict(timing)) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
