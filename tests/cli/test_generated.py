"""The configuration that `pagemill up NAME` writes for its workers."""

import json
import shutil
from pathlib import Path

import msgspec
import pytest
import yaml
from huggingface_hub import constants
from huggingface_hub.utils import _cache_manager
from rich.filesize import decimal
from safetensors.numpy import load_file

from ops.harness import qwen_images
from shared.errors import ConfigError
from shared.models.image_folder import read_image_folder
from shared.stage.pipelines import pipeline_of
from tests import orpheus
from tests.quantized_checkpoints import FORMS, copy_quantized
from tests.support.folders import check_by_engine, check_by_generator
from workers.cli.commands import configure
from workers.cli.models import generated
from workers.cli.models.generated import Wishes, find_models, write_config
from workers.cli.models.local import LocalModel
from workers.cli.models.memory import RESERVE_BYTES
from workers.cli.models.reports import check_folders
from workers.engine.model.check_folders import examine
from workers.roles import default_workers
from workers.settings import DEMO_MODEL, check_paths, load_config


@pytest.fixture(autouse=True)
def checked_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process for each check would import transformers, in 2 s."""
    monkeypatch.setattr("workers.cli.models.reports.check_by_engine", check_by_engine)
    monkeypatch.setattr("workers.cli.models.reports.check_by_generator", check_by_generator)


def test_another_up_leaves_the_file_of_a_running_one_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    model = LocalModel("demo", DEMO_MODEL)
    reports = check_folders([DEMO_MODEL])
    monkeypatch.setattr(generated, "check_folders", lambda *_, **__: reports)
    first, _ = write_config([model], Wishes(max_model_len=512))
    written = first.read_bytes()
    second, _ = write_config([model], Wishes(max_model_len=256))
    assert write_config([model], Wishes(max_model_len=512))[0] == first
    assert first.read_bytes() == written
    lens = [
        yaml.safe_load(file.read_text())["models"]["demo"]["max_model_len"]
        for file in (first, second)
    ]
    assert lens == [512, 256]
    assert set(first.parent.iterdir()) == {first, second}


def test_int8_is_written_for_the_engine_and_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    reports = check_folders([DEMO_MODEL])
    monkeypatch.setattr(generated, "check_folders", lambda *_, **__: reports)
    file, lines = write_config([LocalModel("demo", DEMO_MODEL)], Wishes(quantization="int8"))
    entry = yaml.safe_load(file.read_text())["models"]["demo"]
    assert (entry["quantization"], entry["dtype"]) == ("int8", "bfloat16")
    # Without int8, they take 5.3 MB in bfloat16.
    assert "demo: weights 4.1 MB as int8 and bfloat16" in lines[0]
    monkeypatch.setenv("PAGEMILL_ENGINE__DEVICE", "cuda")
    with pytest.raises(ConfigError, match=r"demo\.quantization: int8 does not run on a GPU"):
        write_config([LocalModel("demo", DEMO_MODEL)], Wishes(quantization="int8"))
    # The engine chooses the type, by that of the checkpoint.
    file, _ = write_config([LocalModel("demo", DEMO_MODEL)], Wishes())
    assert "dtype" not in yaml.safe_load(file.read_text())["models"]["demo"]


def test_the_memory_of_all_ranks_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PAGEMILL_ENGINE__TENSOR_PARALLEL", "2")
    _, lines = write_config([LocalModel("demo", DEMO_MODEL)], Wishes(dtype="float32"))
    assert "demo: weights 10.5 MB as float32" in lines[0]
    assert "KV cache 2 times " in lines[0]
    monkeypatch.setenv("PAGEMILL_ENGINE__TENSOR_PARALLEL", "4")
    with pytest.raises(ConfigError, match="4 ranks cannot share 6"):
        write_config([LocalModel("demo", DEMO_MODEL)], Wishes())


def test_quantized_weights_are_counted_by_their_values(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, _ = copy_quantized(DEMO_MODEL, tmp_path, FORMS["fp8_blocks"])
    monkeypatch.setattr(generated, "check_folders", lambda *_, **__: [examine(folder)])
    file, lines = write_config([LocalModel("demo", folder)], Wishes(dtype="bfloat16"))
    assert "demo: weights 5.3 MB as bfloat16" in lines[0]
    label = "FP8, blocks of 48 x 40"
    assert f"demo: weights are stored as {label}" in lines
    assert "quantization" not in yaml.safe_load(file.read_text())["models"]["demo"]


def test_the_sampling_defaults_of_the_folder_are_written_and_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, folder, ignore=shutil.ignore_patterns("training"))
    stated = {"temperature": 0.6, "top_k": 20, "eos_token_id": 756}
    (folder / "generation_config.json").write_text(json.dumps(stated))
    monkeypatch.setattr(generated, "check_folders", lambda *_, **__: [examine(folder)])
    file, lines = write_config([LocalModel("demo", folder)], Wishes())
    entry = yaml.safe_load(file.read_text())["models"]["demo"]
    assert entry["sampling_defaults"] == {"temperature": 0.6, "top_k": 20}
    assert "demo: temperature 0.6, top_k 20 by default, from its generation_config.json" in lines
    assert load_config(file).models["demo"].sampling_defaults == entry["sampling_defaults"]


def test_fewer_sequences_are_written_for_the_states_of_a_hybrid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(generated, "available_bytes", lambda: 4 * 2**30)
    (report,) = check_folders([DEMO_MODEL])
    report = msgspec.structs.replace(report, state_bytes_per_sequence=50 * 2**20)
    monkeypatch.setattr(generated, "check_folders", lambda *_, **__: [report])
    models = [LocalModel("demo", DEMO_MODEL)]
    file, _ = write_config(models, Wishes())
    num_seqs = load_config(file).engine.max_num_seqs
    assert 1 <= num_seqs < 64
    monkeypatch.setenv("PAGEMILL_ENGINE__MAX_NUM_SEQS", str(num_seqs))
    assert "max_num_seqs" not in yaml.safe_load(write_config(models, Wishes())[0].read_text())
    monkeypatch.setenv("PAGEMILL_ENGINE__MAX_NUM_SEQS", str(num_seqs + 1))
    with pytest.raises(ConfigError, match=f"states of {num_seqs} sequences fit"):
        write_config(models, Wishes())


def test_a_folder_of_diffusers_gets_a_stage_that_paints_and_its_parts_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    qwen_images.write(tmp_path / "brush")
    models = find_models([str(tmp_path / "brush")])
    file, lines = write_config(models, Wishes(dtype="bfloat16"))
    parts = read_image_folder(tmp_path / "brush").parts
    sizes = {name: decimal(2 * part.num_parameters) for name, part in parts.items()}
    sizes["vae"] = decimal(4 * parts["vae"].num_parameters)
    assert lines[0].startswith(
        f"brush: text encoder {sizes['text_encoder']}, transformer {sizes['transformer']},"
        f" vae {sizes['vae']} as bfloat16, of "
    )
    config = load_config(file)
    check_paths(config)
    pipeline = pipeline_of(config.models["brush"])
    assert [stage.name for stage in pipeline.stages] == ["dit"]
    assert pipeline.painter is not None
    assert "1024x1024" in pipeline.painter.sizes
    assert pipeline.painter.sampling_defaults == {"steps": 50, "guidance": 4.0}
    assert [(spec.role, spec.stage) for spec in default_workers(config) if spec.model] == [
        ("generator", "dit")
    ]


def test_a_model_that_paints_and_one_with_text_share_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    qwen_images.write(tmp_path / "brush")
    models = [LocalModel("demo", DEMO_MODEL), *find_models([str(tmp_path / "brush")])]
    file, lines = write_config(models, Wishes())
    assert [line.partition(":")[0] for line in lines[:2]] == ["brush", "demo"]
    assert load_config(file).models["brush"].dtype == "float32"
    weights = sum(
        read_image_folder(tmp_path / "brush").num_bytes(name, "float32")
        for name in ("text_encoder", "transformer", "vae")
    )
    monkeypatch.setattr(generated, "available_bytes", lambda: RESERVE_BYTES + weights - 1)
    with pytest.raises(ConfigError, match=f"brush: the weights need {weights} bytes, all else"):
        write_config(models[1:], Wishes())
    with pytest.raises(ConfigError, match="quantization: brush paints"):
        write_config(models, Wishes(quantization="int8"))


def test_a_folder_of_diffusers_that_is_not_served_is_refused_before_anything_starts(
    tmp_path: Path,
) -> None:
    qwen_images.write(tmp_path / "brush")
    index = tmp_path / "brush" / "model_index.json"
    (tmp_path / "brush" / "vae" / "config.json").rename(tmp_path / "vae.json")
    with pytest.raises(ConfigError, match=r"is incomplete, it lacks vae/config.json"):
        find_models([str(tmp_path / "brush")])
    (report,) = check_folders([tmp_path / "brush"])
    assert (report.family, report.source) == ("qwen-image", "diffusers")
    assert report.reason == "lacks vae/config.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"_class_name": "KolorsPipeline"}))
    models = find_models([str(tmp_path / "brush")])
    with pytest.raises(ConfigError, match=r"brush is refused: has the pipeline 'KolorsPipeline'"):
        write_config(models, Wishes())


def test_orpheus_speaks_with_the_codec_of_the_hubs_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for module in (constants, _cache_manager):  # The second one has the name from its import.
        monkeypatch.setattr(module, "HF_HUB_CACHE", str(tmp_path / "hub"))
    orpheus.write(tmp_path / "voice")
    models = find_models([str(tmp_path / "voice")])
    with pytest.raises(ConfigError) as refused:
        write_config(models, Wishes())
    assert "voice needs its codec: run `hf download hubertsiuzdak/snac_24khz`" in str(refused.value)
    cached = tmp_path / "hub" / "models--hubertsiuzdak--snac_24khz"
    codec = cached / "snapshots" / ("0" * 40)
    codec.mkdir(parents=True)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("0" * 40)
    orpheus.write_snac(codec)
    file, lines = write_config(models, Wishes())
    weights = load_file(tmp_path / "voice" / "model.safetensors").values()
    size = sum(weight.nbytes for weight in weights) + (codec / "pytorch_model.bin").stat().st_size
    assert lines[0].startswith(f"voice: weights {decimal(size)} as float32")
    assert configure.check(config=file) == 0
    codec_size = decimal((codec / "pytorch_model.bin").stat().st_size)
    assert f"code2wav {codec_size}" in capsys.readouterr().out
    config = load_config(file)
    check_paths(config)
    stage = pipeline_of(config.models["voice"]).stage("code2wav")
    assert stage is not None
    assert stage.path == str(codec)
    file.write_text("models: {voice: {path: voice, graph: orpheus}}")
    with pytest.raises(ConfigError) as refused:
        check_paths(load_config(file))
    assert refused.value.field == "models.voice.path"
    (tmp_path / "pagemill.yaml").write_text("models: {voice: {path: voice}}")
    with pytest.raises(ConfigError, match="Orpheus has its codec in another folder") as refused:
        check_paths(load_config(tmp_path / "pagemill.yaml"))
    assert refused.value.field == "models.voice.stages.code2wav.path"
