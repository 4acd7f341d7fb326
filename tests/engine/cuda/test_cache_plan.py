"""The size of the KV cache on a GPU: its arithmetic, and the steps whose memory is measured."""

import re
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shared.config.kv_cache import MemoryUse, plan_blocks
from shared.config.schema import EngineConfig, ModelConfig
from shared.errors import ConfigError
from shared.models import tower
from shared.models.tower_adapter import Fields
from workers.engine.core.sequence import RequestOutput
from workers.engine.cuda.profiling import ClaimedMemory, Profile
from workers.engine.loader import LoadedModel, load
from workers.engine.main import build_core, size_cache
from workers.settings import DEMO_MODEL

GIB, MIB = 2**30, 2**20
H100 = MemoryUse(72 * GIB, 79 * GIB, 15 * GIB, GIB, 2 * GIB)

sizes = st.integers(0, 100 * GIB)


@given(sizes, sizes, sizes, sizes, sizes, st.integers(1, 64 * MIB), st.integers(1, 10**6))
def test_a_cache_never_takes_what_others_have(
    limit: int, free: int, weights: int, graphs: int, step: int, block_bytes: int, length: int
) -> None:
    use = MemoryUse(limit, free, weights, graphs, step)
    try:
        num_blocks = plan_blocks(use, block_bytes, 16, length)
    except ConfigError:
        assert max(0, use.cache) // block_bytes < -(-length // 16)
    else:
        assert weights + graphs + step + num_blocks * block_bytes <= min(limit, free)
        assert num_blocks * 16 >= length
        # Another block would not fit.
        assert use.cache < (num_blocks + 1) * block_bytes


@given(st.integers(1, 60 * GIB), st.integers(1, 4 * MIB))
def test_the_remedies_of_an_error_would_fit(weights: int, block_bytes: int) -> None:
    use, length = MemoryUse(40 * GIB, 79 * GIB, weights, GIB, 8 * GIB), 10**6
    try:
        plan_blocks(use, block_bytes, 16, length)
    except ConfigError as error:
        if shorter := re.search(r"max_model_len to (\d+)", error.message):
            assert plan_blocks(use, block_bytes, 16, int(shorter[1]))
        if larger := re.search(r"gpu_memory to (\d+) MiB", error.message):
            limit = int(larger[1]) * MIB
            wider = MemoryUse(limit, use.free, weights, use.graphs, use.step)
            assert plan_blocks(wider, block_bytes, 16, length)


def test_an_error_names_the_uses_of_the_memory() -> None:
    with pytest.raises(ConfigError) as raised:
        plan_blocks(H100, MIB, 16, 1_000_000)
    assert raised.value.message == (
        "engine.gpu_memory: one sequence of max_model_len 1000000 needs 65.5 GB. KV cache 58.0 GB"
        " of 77.3 GB: weights take 16.1 GB, a step 2.1 GB, CUDA graphs 1.1 GB. Either set the"
        " model's max_model_len to 884736 or less, or use a device with more memory"
    )


class RecordedMemory:
    """Readings of a device, in the order in which a worker takes them."""

    def __init__(self) -> None:
        self._allocated = [600 * MIB, 640 * MIB, 610 * MIB]
        self._peaks = [700 * MIB, 640 * MIB]

    def free(self) -> int:
        return 900 * MIB

    def allocated(self) -> int:
        return self._allocated.pop(0)

    def peak(self) -> int:
        return self._peaks.pop(0)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    model = ModelConfig(str(DEMO_MODEL), max_model_len=1024)
    return load(model, EngineConfig(kernels="torch", kv_cache_mib=16))


def test_the_cache_gets_what_the_largest_steps_and_images_leave(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tower, "GPU_RUN_LEN", 64)
    engine = EngineConfig(kernels="torch", max_num_seqs=4, max_num_batched_tokens=32)
    memory = ClaimedMemory(RecordedMemory(), limit=800 * MIB, cache_bytes=20 * MIB)
    sized = size_cache(loaded, engine, memory)
    block_bytes = 16 * MIB / loaded.num_blocks
    assert sized.num_blocks * block_bytes == pytest.approx(50 * MIB, rel=0.01)
    assert sized.max_model_len == 1024


def test_images_that_do_not_fit_are_refused_with_a_remedy(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    def encode(batch: Sequence[Fields]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    assert loaded.tower is not None
    monkeypatch.setattr(loaded.tower.adapter, "encode", lambda model, run: encode(run))
    memory = ClaimedMemory(RecordedMemory(), limit=800 * MIB)
    with pytest.raises(ConfigError, match=r"engine\.gpu_memory: the largest images do not fit"):
        memory.measure_tower(loaded.tower)


@pytest.mark.parametrize(
    ("num_seqs", "budget", "steps"),
    [
        # The largest step, a prompt next to decodes, decodes alone, and the last ones.
        (4, 32, [32, 11, 4, 1]),
        (1, 2048, [1021, 1021, 1, 1]),
    ],
)
def test_the_largest_steps_of_an_engine_are_run(
    loaded: LoadedModel,
    num_seqs: int,
    budget: int,
    steps: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = EngineConfig(kernels="torch", max_num_seqs=num_seqs, max_num_batched_tokens=budget)
    profile = Profile.of(engine, loaded.block_size, loaded.max_model_len)
    small = replace(loaded, num_blocks=profile.num_blocks, max_model_len=profile.max_model_len)
    core = build_core(small, engine)
    num_tokens: list[int] = []
    run = core.step

    def step() -> list[RequestOutput]:
        before = core.stats().num_batched_tokens
        outputs = run()
        num_tokens.append(core.stats().num_batched_tokens - before)
        return outputs

    monkeypatch.setattr(core, "step", step)
    profile.run(core)
    assert num_tokens == steps


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_build_of_torch_without_cuda_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^device: it is cuda, but torch .*`make install`"):
        ClaimedMemory.claim(EngineConfig(device="cuda"))
    assert ClaimedMemory.claim(EngineConfig()) is None
