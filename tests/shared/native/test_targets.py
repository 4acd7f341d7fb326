"""Libraries in an image for named processors, and the error when none fits."""

import shutil
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from shared.errors import ConfigError
from shared.native import library, targets
from shared.native.targets import TARGETS

ROOT = Path(__file__).parents[3]
AVX512 = TARGETS["avx512"].needs
BF16 = TARGETS["avx512_bf16"].needs
AMX = TARGETS["amx"].needs


def make_folder(tmp_path: Path, *names: str) -> Path:
    folder = tmp_path / "compiled"
    folder.mkdir()
    for name in names:
        (folder / targets.file_name(name)).touch()
    return folder


def test_the_best_library_that_the_processor_can_run_is_taken(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "avx512", "amx")
    files = {features: targets.find_compiled(features, folder) for features in (AVX512, BF16, AMX)}
    assert files == {
        AVX512: folder / targets.file_name("avx512"),
        BF16: folder / targets.file_name("avx512"),
        AMX: folder / targets.file_name("amx"),
    }
    assert targets.find_compiled(AVX512 - {"avx512vl"}, folder) is None
    assert targets.find_compiled(AMX, tmp_path / "none") is None


def test_a_library_of_other_sources_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_folder(tmp_path, "avx512")
    sources = tmp_path / "sources"
    shutil.copytree(targets.SOURCE_FOLDER, sources)
    monkeypatch.setattr(targets, "SOURCE_FOLDER", sources)
    assert targets.find_compiled(AVX512, folder) is not None
    with (sources / targets.HEADERS[0]).open("a") as file:
        file.write("// changed\n")
    assert targets.find_compiled(AVX512, folder) is None


def test_the_build_argument_is_named_where_no_library_fits(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, "amx")
    reason = targets.missing_reason(BF16, folder)
    assert reason == (
        "there are compiled kernels for amx, but none of them supports this processor: build the"
        " image or the wheel with KERNELS=avx512_bf16"
    )
    empty = tmp_path / "empty"
    empty.mkdir()
    assert targets.missing_reason(BF16, empty) == (
        "no kernels were compiled in advance: build the image or the wheel with KERNELS=avx512_bf16"
    )
    reason = targets.missing_reason(frozenset({"avx2"}), folder)
    assert "no kernels support this processor" in reason
    assert targets.missing_reason(BF16, tmp_path / "none") == "no C++ compiler is installed"
    dockerfile = (ROOT / "compose" / "Dockerfile").read_text(encoding="utf-8")
    assert f"ARG {targets.BUILD_ARGUMENT}=" in dockerfile
    assert f"{targets.BUILD_ARGUMENT} ?=" in (ROOT / "Makefile").read_text(encoding="utf-8")


def test_unknown_targets_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no target 'sse2'; there are: amx, avx512, avx512_bf16"):
        targets.compile_targets(["avx512", "sse2"], folder=tmp_path / "compiled")
    assert not (tmp_path / "compiled").exists()


@pytest.mark.skipif(
    shutil.which("g++") is None or not library.processor_flags() >= AVX512,
    reason="no compiler, or no AVX-512",
)
def test_an_image_needs_no_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "compiled"
    monkeypatch.setattr(targets, "COMMON_FLAGS", (*targets.COMMON_FLAGS, "-O0"))
    targets.compile_targets(["avx512"], folder=folder)
    assert [file.name for file in folder.iterdir()] == [targets.file_name("avx512")]
    monkeypatch.setattr(targets, "FOLDER", folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    library.load.cache_clear()
    try:
        assert library.load() is not None
        assert not (tmp_path / "cache").exists()
        for file in folder.iterdir():
            file.unlink()
        library.load.cache_clear()
        with capture_logs() as logs:
            assert library.load() is None
        (event,) = logs
        assert event["log_level"] == "warning"
        assert "wheel with KERNELS=" in event["reason"]
    finally:
        library.load.cache_clear()
