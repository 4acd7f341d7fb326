"""Lines about KV caches before the start, and refusals of caches that are too small."""

import msgspec
import pytest

from shared.config.parsing import parse_config
from shared.config.schema import Config, EngineConfig
from shared.errors import ConfigError
from shared.gpu.devices import Gpu
from workers.cli.models import cache_sizes
from workers.cli.models.cache_sizes import describe_caches
from workers.cli.models.reports import Report, TalkerReport
from workers.engine.model.check_folders import examine
from workers.settings import DEMO_MODEL


@pytest.fixture(scope="module")
def report() -> Report:
    return msgspec.convert(msgspec.to_builtins(examine(DEMO_MODEL)), Report)


def configure(model: str = "", engine: str = "") -> Config:
    return parse_config(
        f"{{models: {{demo: {{path: {DEMO_MODEL}, {model}}}}}, engine: {{{engine}}}}}", {}, "test"
    )


def lines_of(config: Config, report: Report) -> list[str]:
    pools = config.models["demo"].pools
    engines: dict[str, EngineConfig] = {} if pools else {"engine": config.engine}
    engines |= {f"models.demo.pools.{name}": pool for name, pool in pools.items()}
    return [
        line
        for section, engine in engines.items()
        for line in describe_caches(config, "demo", section, engine, report)
    ]


def test_each_pool_has_a_line(report: Report) -> None:
    pools = "gpu: {device: cuda, gpu_memory: 1 GiB}, any: {device: cuda}, cpu: {num_blocks: 100}"
    config = configure(f"max_model_len: 512, pools: {{{pools}}}")
    gpu, unknown, cpu = lines_of(config, report)
    assert gpu.startswith("KV cache of models.demo (pool gpu): at most 1.1 GB, 1391232 tokens")
    assert "the part of 0.9 of the GPU" in unknown
    assert cpu == "KV cache of models.demo (pool cpu): 1.2 MB, 800 tokens"


def test_ranks_and_a_talker_have_separate_caches(report: Report) -> None:
    config = configure(engine="tensor_parallel: 2, kv_cache_mib: 64")
    talker = TalkerReport(1, 1000, 4 * report.kv_values_per_token)
    engine, spoken = lines_of(config, msgspec.structs.replace(report, talker=talker))
    assert engine.endswith("(engine): 67.1 MB, 43688 tokens in each of 2 ranks")
    assert spoken == "KV cache of models.demo (talker): 67.1 MB, 10922 tokens"


def test_the_smallest_gpu_counts(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = [Gpu(str(n), f"GPU-{n}", "a card", 2**30 * size, 2**29) for n, size in ((0, 4), (1, 2))]
    monkeypatch.setattr(cache_sizes, "read_gpus", lambda: gpus)
    (line,) = lines_of(configure(engine="device: cuda, gpu_memory: 0.5"), report)
    assert "at most 1.1 GB, 1391232 tokens" in line
    config = configure(engine="device: cuda, gpu_memory: 0.5, devices: [0]")
    (line,) = lines_of(config, report)
    assert "at most 2.1 GB" in line


@pytest.mark.parametrize(
    ("model", "engine", "field", "remedies"),
    [
        (
            "",
            "num_blocks: 9",
            "engine.num_blocks",
            ("engine.num_blocks to 64)", "max_model_len to 72 or less"),
        ),
        (
            ", pools: {a: {device: cuda, gpu_memory: 5.3 MiB}}",
            "",
            "models.demo.pools.a.gpu_memory",
            ("raise models.demo.pools.a.gpu_memory to 6 MiB", "max_model_len to"),
        ),
    ],
)
def test_a_cache_that_is_too_small_is_refused_with_what_would_fit(
    model: str, engine: str, field: str, remedies: tuple[str, ...], report: Report
) -> None:
    config = configure(f"max_model_len: 512{model}", engine)
    with pytest.raises(ConfigError) as caught:
        lines_of(config, report)
    assert caught.value.field == field
    assert f"{field}: " in caught.value.message
    for remedy in remedies:
        assert remedy in caught.value.message
