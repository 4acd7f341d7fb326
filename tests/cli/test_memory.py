"""The plan of memory for models that `pagemill up` is given by name."""

from dataclasses import replace
from pathlib import Path

import pytest

from shared.errors import ConfigError
from workers.cli.models.memory import (
    KV_MARGIN,
    RESERVE_BYTES,
    ModelNeeds,
    Weights,
    available_bytes,
    make_plan,
)

GIB = 2**30
# Like Qwen2-VL 2B.
BILLIONS = ModelNeeds("two", Weights(2_200_000_000), 28 * 2 * 2 * 128, 32768, "bfloat16")


def test_a_large_model_gets_a_context_that_fits() -> None:
    plan = make_plan([BILLIONS], 8 * GIB)
    (share,) = plan.shares
    assert share.dtype == "bfloat16"
    rest = 8 * GIB - RESERVE_BYTES - 4_400_000_000
    assert plan.kv_cache_mib * 2**20 <= rest // 2 + 2**20
    assert share.max_model_len * BILLIONS.kv_bytes("bfloat16") <= plan.kv_cache_mib * 2**20
    assert share.max_model_len == 32768
    tight = make_plan([BILLIONS], 4_400_000_000 + RESERVE_BYTES + GIB // 2)
    assert 512 <= tight.shares[0].max_model_len < 32768
    assert tight.shares[0].max_model_len % 256 == 0


def test_the_whole_context_of_a_model_is_not_rounded() -> None:
    whisper = ModelNeeds("w", Weights(39_000_000), 26_000, 448, "float32")
    assert make_plan([whisper], 8 * GIB).shares[0].max_model_len == 448


def test_weights_that_do_not_fit_are_refused_with_figures() -> None:
    with pytest.raises(ConfigError, match=rf"4400000000 bytes as bfloat16.* {4 * GIB} bytes"):
        make_plan([BILLIONS], 4 * GIB)
    with pytest.raises(ConfigError, match="512 tokens"):
        make_plan([BILLIONS], 4_400_000_000 + RESERVE_BYTES + 2**20)


def test_other_types_are_exact_where_that_fits() -> None:
    half = ModelNeeds("half", Weights(2_200_000_000), 28 * 2 * 2 * 128, 4096, "float16")
    assert make_plan([half], 16 * GIB).shares[0].dtype == "float32"
    assert make_plan([half], 8 * GIB).shares[0].dtype == "bfloat16"


def test_int8_weights_take_a_byte_each() -> None:
    rounded = ModelNeeds("r", Weights(200_000_000, 2 * 10**9), 28 * 2 * 2 * 128, 4096, "float16")
    with pytest.raises(ConfigError, match="4400000000 bytes"):
        make_plan([BILLIONS], 5 * GIB - GIB // 2)
    plan = make_plan([rounded], 5 * GIB - GIB // 2)
    (share,) = plan.shares
    assert (share.dtype, share.weights.num_bytes("bfloat16")) == (
        "bfloat16",
        2 * 10**9 + 2 * 200_000_000,
    )
    assert "weights 2.4 GB as int8 and bfloat16," in plan.lines()[0]


def test_stored_numbers_take_their_bytes() -> None:
    numbers = ModelNeeds("n", Weights(10**8, 10**8, 10**9), 28 * 2 * 2 * 128, 4096, "bfloat16")
    plan = make_plan([numbers], 4 * GIB)
    assert "weights 1.3 GB as stored numbers and int8 and bfloat16," in plan.lines()[0]


def test_the_engines_of_a_model_that_speaks_share_the_memory() -> None:
    alone = make_plan([BILLIONS], 8 * GIB)
    plan = make_plan([replace(BILLIONS, num_engines=2)], 8 * GIB)
    assert plan.kv_cache_mib == -(-alone.kv_cache_mib // 2)
    assert f"KV cache 2 times {plan.kv_cache_mib} MiB," in plan.lines()[0]


def test_what_is_set_is_kept() -> None:
    wished = ModelNeeds("w", Weights(1000), 384, 4096, "float16", "float64", 300)
    plan = make_plan([wished], 4 * GIB, kv_cache_mib=100)
    assert (plan.shares[0].dtype, plan.shares[0].max_model_len) == ("float64", 300)
    assert plan.kv_cache_mib == 100
    long = ModelNeeds("w", Weights(1000), 10_000, 4096, "float32", None, 4096)
    with pytest.raises(ConfigError, match="lower --max-model-len"):
        make_plan([long], 4 * GIB, kv_cache_mib=100)
    # A cache of this size shortens the context.
    short = ModelNeeds("w", Weights(1000), 10_000, 4096, "float32")
    length = make_plan([short], 4 * GIB, kv_cache_mib=100).shares[0].max_model_len
    assert length == int(100 * 2**20 / (40_000 * KV_MARGIN)) // 256 * 256


def test_states_take_memory_before_the_cache() -> None:
    # Like Qwen3.5 2B, with 50 MiB of states for a sequence.
    hybrid = replace(BILLIONS, kv_values_per_token=6 * 2 * 2 * 256, state_bytes=50 * 2**20)
    plan = make_plan([hybrid], 32 * GIB)
    assert plan.max_num_seqs == 64
    assert "states of 64 sequences 6.7 GB, of " in plan.lines()[0]
    tight = make_plan([hybrid], 8 * GIB)
    rest = 8 * GIB - RESERVE_BYTES - 4_400_000_000
    assert tight.max_num_seqs == rest // 4 // (2 * hybrid.state_bytes) < 64
    states = tight.shares[0].states_bytes
    assert states + tight.kv_cache_mib * 2**20 <= rest // 2 + 2**20
    assert make_plan([BILLIONS], 8 * GIB).max_num_seqs == 64
    with pytest.raises(ConfigError, match="the states of one sequence need 104857600 bytes"):
        make_plan([hybrid], 4_400_000_000 + RESERVE_BYTES + GIB // 4)


def test_several_models_share_the_memory() -> None:
    other = ModelNeeds("other", Weights(1_000_000_000), 24 * 2 * 8 * 64, 8192, "bfloat16")
    plan = make_plan([BILLIONS, other], 16 * GIB)
    assert [share.name for share in plan.shares] == ["two", "other"]
    assert 2 * plan.kv_cache_mib * 2**20 <= (16 * GIB - RESERVE_BYTES - 6_400_000_000) // 2 + 2**21
    assert len(plan.lines()) == 2


def test_a_container_limits_the_memory(tmp_path: Path) -> None:
    meminfo, cgroup = tmp_path / "meminfo", tmp_path / "cgroup"
    meminfo.write_text("MemTotal: 9 kB\nMemAvailable:  8388608 kB\n")
    assert available_bytes(meminfo, cgroup) == 8 * GIB
    cgroup.mkdir()
    (cgroup / "memory.current").write_text(f"{3 * GIB}\n")
    (cgroup / "memory.stat").write_text(f"anon {GIB}\nactive_file 0\ninactive_file {2 * GIB}\n")
    (cgroup / "memory.max").write_text("max\n")
    assert available_bytes(meminfo, cgroup) == 8 * GIB
    (cgroup / "memory.max").write_text(f"{4 * GIB}\n")
    assert available_bytes(meminfo, cgroup) == 3 * GIB
