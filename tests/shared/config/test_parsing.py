"""Every invalid value is reported with its source, its key and the expected type."""

import pytest

from shared.config.parsing import parse_config
from shared.errors import ConfigError

GOOD = "models: {demo: {path: model}}"


def test_defaults_need_only_a_model() -> None:
    config = parse_config(GOOD, {}, "pagemill.yaml")
    assert config.models["demo"].path == "model"
    assert config.engine.block_size is None


@pytest.mark.parametrize("name", ["qwen2.5-vl", "org/name", "a b", "demo_1"])
def test_models_and_adapters_have_the_names_that_people_know(name: str) -> None:
    text = f"models: {{{name}: {{path: model, adapters: {{{name}: folder}}}}}}"
    config = parse_config(text, {}, "pagemill.yaml")
    assert list(config.models) == list(config.models[name].adapters) == [name]


def test_the_environment_overrides_any_field() -> None:
    env = {
        "PAGEMILL_ENGINE__BLOCK_SIZE": "32",
        "PAGEMILL_NATS__URL": "nats://broker:4222",
        "PAGEMILL_MODELS__DEMO__MAX_IMAGES": "2",
        "HOME": "elsewhere",
    }
    config = parse_config(GOOD, env, "pagemill.yaml")
    assert config.engine.block_size == 32
    assert config.nats.url == "nats://broker:4222"
    assert config.models["demo"].max_images == 2


@pytest.mark.parametrize(
    ("text", "env", "parts"),
    [
        ("models: {}", {}, ["pagemill.yaml", "models", "at least 1"]),
        ("[1, 2]", {}, ["pagemill.yaml", "mapping"]),
        ("a: [", {}, ["pagemill.yaml", "YAML"]),
        (
            "gateway: {port: 1}\nmodels: {demo: {path: a}}\ngateway: {port: 2}",
            {},
            ["pagemill.yaml", "line 3", "gateway: the key is there twice"],
        ),
        (
            "gateway:\n  api_keys:\n  - name: a\n    name: b",
            {},
            ["line 4", "gateway.api_keys[0].name: the key is there twice"],
        ),
        (
            "models: {demo: {path: 3}}",
            {},
            ["pagemill.yaml", "models.demo.path", "a text, not a whole number"],
        ),
        ("models: {demo: {path: a, pth: b}}", {}, ["pagemill.yaml", "models.demo", "pth"]),
        (
            'models: {" a": {path: a}}',
            {},
            ["pagemill.yaml", "models", "' a'", "spaces at the ends"],
        ),
        ('models: {"a\\nb": {path: a}}', {}, ["models", r"a\nb", "printable"]),
        (f"models: {{{'x' * 129}: {{path: a}}}}", {}, ["models", "1 to 128"]),
        (f"models: {{{'é' * 40}: {{path: a}}}}", {}, ["models", "at most 200 in a subject"]),
        (
            'models: {demo: {path: a, adapters: {"a\\tb": c}}}',
            {},
            ["pagemill.yaml", "models.demo.adapters", r"a\tb", "printable"],
        ),
        (
            "models: {demo: {path: a, adapters: {b: 1}}}",
            {},
            ["models.demo.adapters", "must be a text"],
        ),
        ("models: {demo: {path: a, quantization: int4}}", {}, ["demo.quantization", "int4"]),
        (
            "models: {demo: {path: a, quantization: int8, dtype: float64}}",
            {},
            ["pagemill.yaml", "models.demo.quantization", "bfloat16 or float32", "float64"],
        ),
        (
            "models: {demo: {path: a, quantization: int8, adapters: {b: c}}}",
            {},
            ["models.demo.quantization", "LoRA adapters"],
        ),
        (
            "models: {demo: {path: a, quantization: int8}}",
            {"PAGEMILL_ENGINE__DEVICE": "cuda"},
            ["models.demo.quantization", "int8 does not run on a GPU", "engine.device to cpu"],
        ),
        (
            "models: {demo: {path: a, quantization: int8, pools: {big: {device: cuda}}}}",
            {},
            ["models.demo.quantization", "set models.demo.pools.big.device to cpu"],
        ),
        (
            GOOD + "\nengine: {device: 'cuda:1'}",
            {},
            ["engine.device", "one GPU that it sees", "devices: [1]"],
        ),
        (
            "models: {demo: {path: a, stages: {vae: {device: cpu, devices: [0]}}}}",
            {},
            ["models.demo.stages.vae.devices", "set models.demo.stages.vae.device to cuda"],
        ),
        (
            "models: {demo: {path: a, stages: {vae: {gpu_memory: 4 GiB}}}}",
            {},
            ["models.demo.stages.vae.gpu_memory", "set models.demo.stages.vae.device too"],
        ),
        (
            "models: {demo: {path: a, stages: {engine: {device: cuda}}}}",
            {},
            ["models.demo.stages.engine.device", "pools of the model"],
        ),
        (GOOD + "\nencoder: {device: gpu}", {}, ["encoder.device", "'gpu' is not cpu or cuda"]),
        (GOOD + "\nengine: {block_size: many}", {}, ["engine.block_size", "a whole number"]),
        (GOOD + "\nengien: {}", {}, ["engien"]),
        (
            GOOD + "\nengine: {speculative: {min_ngram: 5}}",
            {},
            ["pagemill.yaml", "engine.speculative.min_ngram", "max_ngram, 4"],
        ),
        (GOOD + "\nembeddings: {storage: directory}", {}, ["embeddings.path", "directory"]),
        (
            GOOD + "\nnats: {password_file: secret}",
            {},
            ["pagemill.yaml", "nats.password_file", "nats.url is missing"],
        ),
        (
            GOOD + "\nrenderer: {media_networks: [10.0.0.0/8, 10.0.0.0/99]}",
            {},
            ["pagemill.yaml", "renderer.media_networks", "10.0.0.0/99"],
        ),
        (
            "models: {demo: {path: a, sampling_defaults: {temperature: -1}}}",
            {},
            ["models.demo.sampling_defaults.temperature", "at least 0"],
        ),
        (
            GOOD,
            {"PAGEMILL_ENGINE__BLOCK_SIZE": "many"},
            ["PAGEMILL_ENGINE__BLOCK_SIZE", "engine.block_size", "a whole number"],
        ),
        (
            GOOD + "\nlog_level: info",
            {"PAGEMILL_LOG_LEVEL__X": "1"},
            ["PAGEMILL_LOG_LEVEL__X", "log_level"],
        ),
    ],
)
def test_an_invalid_value_is_reported_with_source_and_key(
    text: str, env: dict[str, str], parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, env, "pagemill.yaml")
    for part in parts:
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PAGEMILL_ENGIN__BLOCK_SIZE", "PAGEMILL_ENGINE__BLOCK_SIZE"),
        ("PAGEMILL_ENGINE__BLOCKSIZE", "PAGEMILL_ENGINE__BLOCK_SIZE"),
        ("PAGEMILL_ENGINE__SPECULATIVE__NUM_TOKEN", "PAGEMILL_ENGINE__SPECULATIVE__NUM_TOKENS"),
        ("PAGEMILL_LOGLEVEL", "PAGEMILL_LOG_LEVEL"),
        ("PAGEMILL_MODELS__DEM0__MAX_IMAGES", "PAGEMILL_MODELS__DEMO__MAX_IMAGES"),
        ("PAGEMILL_MODELS__DEMO__MAX_IMAGE", "PAGEMILL_MODELS__DEMO__MAX_IMAGES"),
        ("PAGEMILL_WITH_NOTHING_LIKE_IT", None),
    ],
)
def test_a_misspelt_variable_is_named_with_the_one_that_was_meant(
    variable: str, meant: str | None
) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config(GOOD, {variable: "1", "PAGEMILL_ENGINE__THREADS": "1"}, "embedded default")
    message = caught.value.message
    assert message.startswith(f"{variable}: ")
    assert "embedded default" not in message
    assert message.partition("did you mean ")[2] == (f"{meant}?" if meant else "")


def test_an_unknown_field_of_the_file_is_not_blamed_on_a_variable() -> None:
    text = GOOD + "\nengine: {blocksize: 1}"
    with pytest.raises(ConfigError) as caught:
        parse_config(text, {"PAGEMILL_ENGINE__THREADS": "1"}, "pagemill.yaml")
    assert caught.value.message.startswith("pagemill.yaml: engine.blocksize: ")


def test_a_value_of_a_variable_that_contradicts_another_names_the_variable() -> None:
    env = {"PAGEMILL_ENGINE__SPECULATIVE__MIN_NGRAM": "9"}
    with pytest.raises(ConfigError, match=r"^PAGEMILL_ENGINE__SPECULATIVE__MIN_NGRAM: "):
        parse_config(GOOD, env, "pagemill.yaml")
