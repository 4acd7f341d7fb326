"""The choice of torch's build, and the options that uv and pip install with."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from ops import install


def choose(monkeypatch: pytest.MonkeyPatch, *, gpu: bool, reachable: bool) -> list[str]:
    monkeypatch.delenv("UV_TORCH_BACKEND", raising=False)
    monkeypatch.setattr(install, "has_gpu", lambda: gpu)
    monkeypatch.setattr(install, "is_reachable", lambda url: reachable)
    return install.choose_torch()


def test_without_a_gpu_torch_is_the_cpu_build(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose(monkeypatch, gpu=False, reachable=True) == ["--torch-backend", "cpu"]
    assert "no NVIDIA GPU: torch's CPU build, 0.2 GB to download" in capsys.readouterr().out


def test_with_a_gpu_or_without_the_index_torch_comes_from_the_configured_index(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert choose(monkeypatch, gpu=True, reachable=True) == []
    assert "2 GB to download" in capsys.readouterr().out
    monkeypatch.setattr(install, "pip_settings", dict)
    assert choose(monkeypatch, gpu=False, reachable=False) == []
    printed = capsys.readouterr().out
    for part in ("2 GB to download", "UV_INDEX=", "PIP_FIND_LINKS=", "HTTPS_PROXY="):
        assert part in printed


def test_a_folder_with_the_cpu_build_needs_no_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    version = install.locked_torch().partition("==")[2]
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    (tmp_path / f"torch-{version}+cpu-{python}-{python}-manylinux_2_28_x86_64.whl").touch()
    monkeypatch.setattr(install, "pip_settings", lambda: {"find-links": f"/none {tmp_path}"})
    assert choose(monkeypatch, gpu=False, reachable=False) == []
    printed = capsys.readouterr().out
    assert "torch's CPU build, from the configured folder of wheels" in printed
    assert "2 GB" not in printed


def test_a_uv_that_was_installed_by_half_is_installed_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    uv = tmp_path / "uv"
    uv.write_bytes(b"\x7fELF")
    monkeypatch.setattr(install, "UV", str(uv))
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        if command == [str(uv), "--version"]:
            raise PermissionError(uv)
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(subprocess, "run", run)
    assert install.make_venv() == 0
    venv, tools = commands
    assert "--clear" in venv
    assert "uv>=0.11" in tools


def test_a_failure_without_a_network_names_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(install, "make_venv", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["install"])
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    assert install.main() == 2
    line = "install: the package index cannot be reached; check the network or the proxy\n"
    assert capsys.readouterr().out == line


def test_an_interrupted_installation_prints_one_line() -> None:
    code = "import runpy, ops.install, argparse\n"
    code += "def parse(*_): raise KeyboardInterrupt\n"
    code += "argparse.ArgumentParser.parse_args = parse\n"
    code += "runpy.run_module('ops.install', run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "install: interrupted; run make install again\n")


def test_bytecode_is_written_where_python_would_keep_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "imported.py").touch()
    monkeypatch.setenv(install.NO_BYTECODE, "1")
    monkeypatch.setattr(install, "ROOT", tmp_path)
    monkeypatch.setattr(install, "PYTHON", sys.executable)
    monkeypatch.setattr(install, "IMPORTS", "import imported")
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    install.write_bytecode()
    assert not (tmp_path / "__pycache__").exists()
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    install.write_bytecode()
    assert len(list((tmp_path / "__pycache__").iterdir())) == 1


def test_the_users_own_choice_of_torch_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_TORCH_BACKEND", "cu130")
    monkeypatch.setattr(install, "has_gpu", lambda: pytest.fail("asked"))
    assert install.choose_torch() == []


def test_uv_gets_the_index_and_the_folders_of_pip(monkeypatch: pytest.MonkeyPatch) -> None:
    listing = (
        ":env:.find-links='/own/wheels /more'\n"
        "global.find-links='/all/wheels'\n"
        "global.index-url='https://mirror.example/simple'\n"
    )
    answer = subprocess.CompletedProcess([], 0, stdout=listing)
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: answer)
    for name in ("UV_DEFAULT_INDEX", "UV_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    folders = ["--find-links", "/own/wheels", "--find-links", "/more"]
    index = ["--default-index", "https://mirror.example/simple"]
    assert install.index_options() == [*index, *folders]
    monkeypatch.setenv("UV_DEFAULT_INDEX", "https://own.example/simple")
    assert install.index_options() == folders


def test_the_lock_file_has_hashes_of_all_packages_but_torch(tmp_path: Path) -> None:
    entries = re.split(r"\n(?=\S)", install.LOCK.read_text(encoding="utf-8"))
    without = [entry for entry in entries if "--hash=sha256:" not in entry]
    assert [re.sub(r"==\S+$", "", entry) for entry in without] == ["torch"]
    commands = list(install.pip_commands(tmp_path))
    assert "torch==" not in (tmp_path / "requirements.txt").read_text(encoding="utf-8")
    assert any(without[0] in command for command in commands)


def test_every_dependency_of_the_product_is_locked() -> None:
    text = (install.ROOT / "pyproject.toml").read_text(encoding="utf-8")
    declared = text.partition("\ndependencies = [")[2].partition("\n]")[0]
    names = set(re.findall(r'^  "([\w-]+)', declared, re.MULTILINE))
    locked = set(re.findall(r"^([\w-]+)==", install.LOCK.read_text(encoding="utf-8"), re.MULTILINE))
    assert "torch" in names
    assert names <= locked


def test_the_size_of_a_folder_is_that_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "a").write_bytes(b"12345")
    (tmp_path / "b").write_bytes(b"123")
    assert install.size_of(tmp_path) == 8
