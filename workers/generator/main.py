"""Generator: converts the codec frames of another stage to sound, or paints images or videos.

The texts and the latents of a stage that paints may have separate stages.
"""

import asyncio
from pathlib import Path

from shared.errors import ConfigError
from shared.gpu.meter import measure_gpu
from shared.helpers.heap import keep_freed_memory
from shared.models.dtypes import choose_dtype
from shared.protocol.pipeline import AUDIO, CODES, IMAGE_KIND, LATENTS, TEXTS, VIDEO_KIND, StageSpec
from shared.stage.runtime import Context


async def main(context: Context) -> None:
    name = context.model
    if name is None:
        raise ConfigError("a generator serves one model: name it with --model", field="model")
    pipeline = context.pipelines[name]
    stage = pipeline.stage(context.stage.name)
    key = f"models.{name}.stages.{context.stage.name}"
    kind = None if stage is None or stage.output is None else stage.output.kind
    work = pipeline.painting_of(context.stage.name)
    if stage is not None and kind == AUDIO and stage.chunks is not None:
        await _serve_sound(context, name, stage, key)
    elif stage is not None and (kind in (IMAGE_KIND, VIDEO_KIND) or len(work) == 1):
        await _serve_images(context, name, stage, key)
    else:
        message = (
            f"a generator needs an input {CODES!r} and an output of kind {AUDIO!r}, or an output of"
            f" kind {IMAGE_KIND!r} or {VIDEO_KIND!r}, or a fan-out input {TEXTS!r} or {LATENTS!r}"
        )
        raise ConfigError(f"{key}: {message}", field=key)


def _folder(context: Context, model: str, stage: StageSpec) -> Path:
    return Path(stage.path or context.config.models[model].path)


def _claim_gpu(context: Context, model: str) -> None:
    """Limit the memory of this worker on its GPU, and report the device, if it computes on one."""
    generator = context.config.generator
    if generator.device != "cpu":
        # Some vocoders compute without torch.
        from shared.gpu.allocator import limit_memory

        limit_memory(generator)
        measure_gpu(generator, context.metrics.of(model))


async def _serve_sound(context: Context, model: str, stage: StageSpec, key: str) -> None:
    from workers.generator.loader import load_vocoder
    from workers.generator.speech_worker import SpeechWorker
    from workers.generator.vocoder_thread import VocoderThread

    assert stage.chunks is not None
    # Chunks need arrays of the same sizes again and again.
    keep_freed_memory()
    context.step("loading the vocoder")
    folder = _folder(context, model, stage)
    config = context.config
    _claim_gpu(context, model)
    vocoder = await asyncio.to_thread(
        load_vocoder,
        folder,
        stage.chunks,
        key,
        voices=context.pipelines[model].voices,
        # A vocoder is small, and its sound is better in float32.
        dtype=choose_dtype(config.models[model].dtype, None, "cpu"),
        device=config.generator.device,
    )
    thread = VocoderThread(vocoder, context.config.generator.max_batch)
    await SpeechWorker(context, model, thread, stage.chunks, vocoder).serve()


async def _serve_images(context: Context, model: str, stage: StageSpec, key: str) -> None:
    # Only a worker that paints loads torch.
    import torch

    from shared.models.digest import digest_of_files
    from workers.generator.core.denoising import check_input_images
    from workers.generator.image_items import LatentsWorker, StageFiles, StageTexts, TextWorker
    from workers.generator.image_loader import load_image_model, served_dtype
    from workers.generator.image_results import ImageResults
    from workers.generator.image_thread import ImageThread
    from workers.generator.image_worker import ImageWorker
    from workers.generator.text_store import TextStore

    config, bus, pipeline = context.config, context.bus, context.pipelines[model]
    if config.generator.threads:
        torch.set_num_threads(config.generator.threads)
    context.step("loading the painter")
    folder, dtype = _folder(context, model, stage), config.models[model].dtype
    device, report, work = config.generator.device, context.step, pipeline.painting_of(stage.name)
    _claim_gpu(context, model)
    painter = await asyncio.to_thread(
        load_image_model, folder, dtype, stage.sizes, key, device, report, stage.size_rule, work
    )
    thread = ImageThread(painter, config.generator.max_images)
    edges = {edge.carries: edge for edge in pipeline.edges_from(stage.name, "fan_out")}
    store = None
    if work == {TEXTS} or TEXTS in edges:
        store = TextStore(bus, await context.open_blobs(), config.embeddings.ttl_s)
    if work == {LATENTS}:
        return await LatentsWorker(context, model, thread).serve()
    if work == {TEXTS}:
        assert store is not None
        return await TextWorker(context, model, thread, painter, store).serve()
    check_input_images(painter, stage.input_images, key)
    ttl_s, weights = config.generator.result_ttl_s, ""
    if ttl_s or store is not None:
        context.step("hashing the painter's files")
        files = await asyncio.to_thread(digest_of_files, folder)
        weights = f"{files} {stage.name} {served_dtype(folder, dtype, device)}"
    await ImageWorker(
        context,
        model,
        thread,
        painter,
        weights,
        ImageResults(bus, ttl_s) if ttl_s else None,
        None if store is None else StageTexts(bus, edges[TEXTS], store, weights),
        StageFiles(bus, edges[LATENTS]) if LATENTS in edges else None,
    ).serve()
