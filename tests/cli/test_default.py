"""Without a file, one model answers, speaks and paints, of files that are in the wheel."""

import tomllib
from pathlib import Path

from shared.stage.pipelines import pipeline_of
from workers import settings
from workers.cli import sound
from workers.roles import default_workers

STAGES = ["talker", "code2wav", "dit"]
ROOT = Path(__file__).parents[2]


def test_the_default_model_speaks_and_paints() -> None:
    config = settings.load_config(None)
    assert sound.find_audio(config, None) == ("demo", "audio")
    settings.check_paths(config)
    assert [spec.stage for spec in default_workers(config) if spec.stage] == STAGES
    painter = pipeline_of(config.models["demo"]).painter
    assert painter is not None
    assert painter.output is not None
    assert painter.output.name == "image"


def test_the_wheel_has_all_files_of_the_default_model() -> None:
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    included = built["targets"]["wheel"]["force-include"]
    assert all(source == target for source, target in included.items())
    model = settings.load_config(None).models["demo"]
    folders = [model.path, *(stage.path for stage in model.stages.values())]
    for folder in folders:
        assert folder is not None
        needed = [
            file.relative_to(ROOT)
            for file in Path(folder).iterdir()
            if file.suffix in (".json", ".jinja", ".safetensors")
        ]
        assert needed
        for file in needed:
            parts = (str(file), *map(str, file.parents))
            assert not included.keys().isdisjoint(parts), f"{file} is not in the wheel"


def test_the_default_model_is_small() -> None:
    model = settings.load_config(None).models["demo"]
    for stage in model.stages.values():
        assert stage.path is not None
        files = [file for file in Path(stage.path).iterdir() if file.is_file()]
        assert sum(file.stat().st_size for file in files) < 8 * 2**20
