"""Qwen-Image with random weights, and its pipeline."""

from typing import Any

import torch

from ops.harness.qwen_images import SCALE, build_pipeline, write
from shared.protocol.images import PaintParams, parse_size
from tests.generator.pipelines.spec import BAD_SIZES, SIZES, PipelineSpec
from workers.generator.core.denoising import noise_of


@torch.no_grad()
def paint_whole(
    prompt: str, params: PaintParams, number: int = 0, dtype: torch.dtype = torch.float64
) -> Any:
    """Return the pixels from 0 to 1 that the pipeline paints of our noise, [height, width, 3].

    An omitted negative prompt is a space, as the card of Qwen-Image says.
    """
    pipeline = build_pipeline(dtype)
    width, height = parse_size(params.size)
    assert params.seed is not None
    shape = (4, height // SCALE, width // SCALE)
    noise = torch.from_numpy(noise_of(params.seed, number, shape))[None, :, None]
    packed = pipeline._pack_latents(noise, 1, *shape)
    images = pipeline(
        prompt=prompt,
        negative_prompt=params.negative_prompt or " ",
        height=height,
        width=width,
        num_inference_steps=params.steps,
        true_cfg_scale=params.guidance,
        latents=packed.to(dtype),
        max_sequence_length=1024,
        output_type="pt",
    ).images
    return images[0].permute(1, 2, 0).numpy()


SPEC = PipelineSpec(
    name="qwen_image",
    write=write,
    paint_whole=paint_whole,
    sizes=SIZES,
    requests=(
        ("a red circle", PaintParams("48x48", 1, 4, 3.0, "ugly", 1)),
        ("two blue cats on a long table", PaintParams("48x48", 1, 6, 2.0, "", 2)),
        ("hill", PaintParams("48x48", 1, 3, 1.0, "", 3)),
        ("wide sea", PaintParams("96x48", 1, 4, 4.0, "x", 4)),
        # The packed latents have the shape of the ones before, but another grid.
        ("tall tree", PaintParams("48x96", 1, 5, 2.5, "a long negative prompt", 5)),
        ("Bäume {0}", PaintParams("48x48", 1, 5, 1.5, "", 2**63 - 1)),
    ),
    settings=(
        ("vae/config.json", "latents_mean", [0.0, 0.0, 0.0, 0.0]),
        ("vae/config.json", "latents_std", [1.0, 1.0, 1.0, 1.0]),
        ("scheduler/scheduler_config.json", "max_shift", 1.15),
        ("scheduler/scheduler_config.json", "shift_terminal", None),
    ),
    max_tokens=1024,
    bad_sizes=BAD_SIZES,
    refused=(
        (
            "scheduler/scheduler_config.json",
            "stochastic_sampling",
            True,
            "scheduler: stochastic_sampling is not supported",
        ),
        ("transformer/config.json", "zero_cond_t", True, "zero_cond_t of the transformer is not"),
    ),
)
