"""`pagemill pull` and `pagemill models` with a hub over HTTP."""

import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import httpx2
import pytest
from huggingface_hub import constants

from ops.harness import qwen_images
from shared.errors import ConfigError, CorruptDownload, DiskFull, Unavailable
from shared.models.image_folder import read_image_folder
from shared.stage.runtime import EXIT_CONFIG
from tests import preloaded
from tests.cli.hub_server import COMMIT, Faults, Hub, etag_of
from tests.cluster.conftest import PAGEMILL, ROOT
from workers import settings
from workers.cli.commands import serve
from workers.cli.commands.models import pull_model
from workers.cli.commands.worker import worker
from workers.cli.models import download
from workers.cli.models.download import check_disk
from workers.cli.models.hub import RemoteFile, RemoteModel, calling_library, translated
from workers.cli.models.local import find_local
from workers.engine.core.sequence import Pooling
from workers.engine.pooling_files import read_pooling

DEMO = ROOT / "ops" / "demo_model"
NAME = "org/demo"
# The demo model with what must never be downloaded.
FILES = {file.name: file.read_bytes() for file in DEMO.iterdir()} | {
    "modeling_demo.py": b"raise SystemExit('code of a model was run')",
    "pytorch_model.bin": b"pickled",
    "onnx/model.safetensors": b"another format",
    "consolidated.safetensors": b"the same weights again",
}
SERVED = set(FILES) - {
    "modeling_demo.py",
    "pytorch_model.bin",
    "onnx/model.safetensors",
    "consolidated.safetensors",
    "README.md",
    "training.json",
    "marks.json",
}
# The pooling of sentence-transformers, with a name that would leave the folder.
POOLING = {
    "modules.json": b'[{"type": "models.Pooling", "path": "1_Pooling"}]',
    "1_Pooling/config.json": b'{"pooling_mode": "mean"}',
}
CLS = POOLING | {"1_Pooling/config.json": b'{"pooling_mode": "cls"}'}
CONFIG = json.loads(FILES["config.json"])
INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
# Models with quantized weights, and the file that shows it.
QUANTIZED: dict[str, dict[str, bytes]] = {
    "config.json": {
        "config.json": json.dumps(
            CONFIG | {"quantization_config": {"quant_method": "hqq"}}
        ).encode()
    },
    "hf_quant_config.json": {"hf_quant_config.json": b'{"quantization": {"quant_algo": "NVFP4"}}'},
    INDEX: {
        INDEX: json.dumps({"weight_map": {"lm_head.qweight": SHARD}}).encode(),
        SHARD: b"never read",
    },
}
OUTSIDE = {"../1_Pooling/config.json": b"{}", "1_Pooling/x/config.json": b"{}"}
WEIGHTS = "model.safetensors"
NO_BROKER = ("--nats", "nats://127.0.0.1:9")


@pytest.fixture
def hub() -> Iterator[Hub]:
    unsupported = {**FILES, "config.json": b'{"model_type": "t5"}'}
    models: dict[str, Mapping[str, bytes]] = {
        NAME: FILES,
        "org/t5": unsupported,
        "org/pickled": {"a.bin": b"x"},
        "org/cls": FILES | CLS,
        **{f"org/{name}": FILES | files for name, files in QUANTIZED.items()},
    }
    with Hub(models | {"org/pooled": FILES | POOLING | OUTSIDE}) as server:
        yield server


class Unshown:
    def begin(self, name: str, size: int, done: int) -> None:
        pass

    def advance(self, num_bytes: int) -> None:
        pass

    def say(self, text: str) -> None:
        pass


def environment(hub: Hub | None, folder: Path, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    endpoint = "http://127.0.0.1:9" if hub is None else hub.url
    own = {"HF_HOME": str(folder / "hf"), "HF_ENDPOINT": endpoint, "PYTHONPATH": str(ROOT)}
    return inherited | own | {"COLUMNS": "300"} | more


def run(
    hub: Hub | None, folder: Path, *arguments: str, **more: str
) -> subprocess.CompletedProcess[str]:
    return preloaded.run(*arguments, cwd=folder, env=environment(hub, folder, **more))


def run_alone(hub: Hub | None, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command without the tests' preloader, which starts no process for the check."""
    return subprocess.run(
        [*PAGEMILL, *arguments],
        cwd=folder,
        env=environment(hub, folder),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def snapshot(folder: Path, model: str = "demo") -> Path:
    return folder / "hf" / "hub" / f"models--org--{model}" / "snapshots" / COMMIT


def partials(folder: Path) -> list[Path]:
    return list((folder / "hf").rglob("*.incomplete"))


def test_only_what_serving_needs_is_downloaded_into_the_cache(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 0, done.stderr
    assert str(snapshot(tmp_path)) in done.stdout
    assert {file.name for file in snapshot(tmp_path).iterdir()} == SERVED
    for name in SERVED:
        assert (snapshot(tmp_path) / name).read_bytes() == FILES[name]
    assert {path for _, path, _ in hub.requests} == SERVED
    assert partials(tmp_path) == []
    # Existing files are not downloaded again.
    hub.requests.clear()
    assert run(hub, tmp_path, "pull", NAME).returncode == 0
    assert [path for method, path, _ in hub.requests if method == "GET"] == []


@pytest.mark.parametrize("options", [(), ("--dir", "here")])
def test_the_pooling_of_a_model_is_downloaded(
    hub: Hub, tmp_path: Path, options: tuple[str, ...]
) -> None:
    done = run(hub, tmp_path, "pull", "org/pooled", *options)
    assert done.returncode == 0, done.stderr
    if not options:
        assert (snapshot(tmp_path, "pooled") / "modules.json").exists()
    (config,) = tmp_path.rglob("1_Pooling/config.json")
    assert read_pooling(config.parents[1], None) == Pooling("mean", normalize=False)
    assert {path for _, path, _ in hub.requests} == SERVED | set(POOLING)


def test_a_pooling_that_is_not_served_is_refused_before_the_weights(
    hub: Hub, tmp_path: Path
) -> None:
    done = run(hub, tmp_path, "pull", "org/cls")
    assert done.returncode == 1
    refusal = "weights were not downloaded: 1_Pooling/config.json: pooling_mode: the engine pools"
    assert refusal in done.stderr
    assert {path for _, path, _ in hub.requests} == {"config.json", *CLS}


@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_refused_before_their_download(
    hub: Hub, tmp_path: Path, name: str
) -> None:
    done = run(hub, tmp_path, "pull", f"org/{name}")
    assert done.returncode == 1
    assert "weights were not downloaded: has quantized weights (" in done.stderr
    assert {path for _, path, _ in hub.requests} == {"config.json", name}


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_nothing_is_written_through_a_link_out_of_the_folder(
    hub: Hub, tmp_path: Path, target: str
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "1_Pooling").symlink_to(tmp_path / target)
    done = run(hub, tmp_path, "pull", "org/pooled", "--dir", "here")
    assert done.returncode == 1
    assert "here/1_Pooling is a link that leads out of here" in done.stderr
    assert hub.requests == []
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_folder_gets_plain_files(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "pull", NAME, "--dir", "here").returncode == 0
    assert {file.name for file in (tmp_path / "here").iterdir()} == SERVED
    # A file of another revision is replaced.
    (tmp_path / "here" / "generation_config.json").write_bytes(
        bytes(len(FILES["generation_config.json"]))
    )
    hub.requests.clear()
    assert run(hub, tmp_path, "pull", NAME, "--dir", "here").returncode == 0
    assert {path for _, path, _ in hub.requests} == {"generation_config.json"}


def test_a_transfer_that_breaks_is_continued(hub: Hub, tmp_path: Path) -> None:
    hub.faults = Faults(break_after=1_000_000, num_breaks=2)
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 0, done.stderr
    ranges = hub.downloads(WEIGHTS)
    assert ranges == [None, "bytes=1000000-", "bytes=2000000-"]
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize(
    "number", [pytest.param(signal.SIGINT, marks=pytest.mark.long), signal.SIGKILL]
)
def test_the_next_pull_continues_one_that_was_ended(
    hub: Hub, tmp_path: Path, number: signal.Signals
) -> None:
    hub.faults = Faults(chunk_pause_s=0.1)
    with (tmp_path / "said").open("wb") as output:
        process = subprocess.Popen(
            [*PAGEMILL, "pull", NAME],
            cwd=tmp_path,
            env=environment(hub, tmp_path),
            stdout=output,
            stderr=output,
        )
    deadline = time.monotonic() + 60
    digest = hashlib.sha256(FILES[WEIGHTS]).hexdigest()
    while not any(p.name.startswith(digest) and p.stat().st_size for p in partials(tmp_path)):
        assert process.poll() is None, (tmp_path / "said").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(number)
    process.wait(30)
    assert "Traceback" not in (tmp_path / "said").read_text()
    assert not (snapshot(tmp_path) / WEIGHTS).exists()
    (partial,) = (p for p in partials(tmp_path) if p.name.startswith(digest))
    received = partial.stat().st_size
    assert 0 < received < len(FILES[WEIGHTS])
    hub.faults = Faults()
    hub.requests.clear()
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 0, done.stderr
    assert hub.downloads(WEIGHTS) == [f"bytes={received}-"]
    assert (snapshot(tmp_path) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


@pytest.mark.parametrize("target", [[], ["--dir", "here"]])
def test_a_corrupt_file_is_refused_and_not_served(
    hub: Hub, tmp_path: Path, target: list[str]
) -> None:
    hub.faults = Faults(corrupt=True)
    done = run(hub, tmp_path, "pull", NAME, *target)
    assert done.returncode == 1
    assert "corrupt_download" in done.stderr
    assert WEIGHTS in done.stderr
    assert list(tmp_path.rglob(WEIGHTS)) == []
    assert partials(tmp_path) == []
    assert run(hub, tmp_path, "up", NAME).returncode == 78
    hub.faults = Faults()
    assert run(hub, tmp_path, "pull", NAME, *target).returncode == 0


def test_server_errors_are_tried_again(hub: Hub, tmp_path: Path) -> None:
    hub.faults = Faults(num_server_errors=2)
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 0, done.stderr
    assert "status 503; trying again in 1 s" in done.stderr


@pytest.mark.parametrize(("num_added", "num_transfers"), [(-1000, 5), (1000, 1)])
def test_a_transfer_of_another_length_ends(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_added: int, num_transfers: int
) -> None:
    hub.faults = Faults(num_added=num_added)
    url = f"{hub.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url)
    monkeypatch.setattr(download, "RETRY_PAUSES_S", (0.0,) * 4)
    content = FILES[WEIGHTS]
    file = RemoteFile(WEIGHTS, len(content), etag_of(WEIGHTS, content))
    with (tmp_path / WEIGHTS).open("ab") as out:
        error = httpx2.RemoteProtocolError if num_added < 0 else CorruptDownload
        with pytest.raises(error, match=str(file.size)):
            download._receive(RemoteModel(NAME, None, COMMIT, [file]), file, out, Unshown())
    assert len(hub.downloads(WEIGHTS)) == num_transfers
    # The next call continues a short one.
    num_bytes = file.size + num_added if num_added < 0 else 0
    assert (tmp_path / WEIGHTS).stat().st_size == num_bytes


def test_a_gated_model_needs_a_token(hub: Hub, tmp_path: Path) -> None:
    hub.faults = Faults(gated=True, token="hf_right")
    for token in ({}, {"HF_TOKEN": "hf_wrong"}):
        done = run(hub, tmp_path, "pull", NAME, **token)
        assert done.returncode == 1
        assert "access_denied" in done.stderr
        assert "HF_TOKEN" in done.stderr
        assert "hf_wrong" not in done.stderr
    assert run(hub, tmp_path, "pull", NAME, HF_TOKEN="hf_right").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["org/nothing"], "not_found", "has no model org/nothing"),
        ([NAME, "--revision", "v9"], "not_found", "no revision 'v9'"),
        (["a b//c"], "not_found", "is not a name such as org/name"),
        (["llama3.2"], "not_found", "'llama3.2' is not a name on the hub such as Qwen/Qwen2-VL"),
        (["org/pickled"], "invalid_configuration", "no model*.safetensors"),
    ],
)
def test_errors_say_what_to_do(
    hub: Hub, tmp_path: Path, arguments: list[str], code: str, message: str
) -> None:
    done = run(hub, tmp_path, "pull", *arguments)
    assert done.returncode == 1
    assert code in done.stderr
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_hub_cannot_name_files_elsewhere(hub: Hub, tmp_path: Path) -> None:
    hub.faults = Faults(etag="../../../../outside")
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 1
    assert "no checksum" in done.stderr
    assert list(tmp_path.rglob("outside*")) == []


def test_a_full_disk_is_found_before_the_download(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = RemoteFile(WEIGHTS, 900_000_000, 64 * "0")
    target = tmp_path / WEIGHTS
    usage = SimpleNamespace(free=800_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    numbers = r"has 762\.9 MiB free, and needs [\d.]+ [MG]iB"
    with pytest.raises(DiskFull, match=rf"{numbers}: delete files"):
        check_disk(tmp_path, [file], {file: target})
    with (tmp_path / f"{WEIGHTS}.incomplete").open("wb") as partial:
        partial.truncate(300_000_000)
    check_disk(tmp_path, [file], {file: target})
    with pytest.raises(DiskFull, match="continues"), translated(NAME, None, tmp_path):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_up_pulls_no_model_that_it_cannot_serve(hub: Hub, tmp_path: Path) -> None:
    done = run(hub, tmp_path, "up", NAME, "--pull", "--max-model-len", "999999999999")
    assert done.returncode == 78
    assert f"{WEIGHTS}: 5.3 MB" in done.stderr
    assert "lower --max-model-len" in done.stderr
    hub.requests.clear()
    done = run(hub, tmp_path, "up", "org/t5", "--pull")
    assert done.returncode == 78
    assert "org/t5 is refused" in done.stderr
    assert {path for _, path, _ in hub.requests} == {"config.json"}


def test_weights_of_a_model_that_is_not_served_are_not_downloaded(hub: Hub, tmp_path: Path) -> None:
    for run_it in (run_alone, run):
        done = run_it(hub, tmp_path, "pull", "org/t5")
        assert done.returncode == 1
        assert "weights were not downloaded: uses cross attention" in done.stderr
        assert hub.downloads("config.json") == [None]
        assert hub.downloads(WEIGHTS) == []


def test_no_network_is_a_separate_error(tmp_path: Path) -> None:
    done = run(None, tmp_path, "pull", NAME)
    assert done.returncode == 1
    assert "unavailable" in done.stderr
    assert "HF_ENDPOINT" in done.stderr


def test_an_answer_that_is_no_json_is_an_error_of_the_hub() -> None:
    """A proxy may answer every request with its own page."""
    with pytest.raises(Unavailable, match=r"is not a hub .*HF_ENDPOINT"), calling_library():
        json.loads("<html>")


@pytest.mark.parametrize("error", [TypeError, KeyError, ValueError, AttributeError])
def test_a_fault_of_the_download_is_not_reported_as_a_fault_of_the_hub(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: type[Exception]
) -> None:
    def fail(*_: object) -> None:
        raise error("a fault")

    monkeypatch.setattr(download, "check_disk", fail)
    with pytest.raises(error, match="a fault"):
        download.download(RemoteModel(NAME, None, COMMIT, []), tmp_path, Unshown())


@pytest.mark.parametrize(
    "info",
    [
        [1],
        {"sha": COMMIT},
        {"id": NAME, "sha": COMMIT, "siblings": 7},
        {"id": NAME, "sha": COMMIT, "siblings": [{"size": 3}]},
        {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": 5}]},
        {
            "id": NAME,
            "sha": COMMIT,
            "siblings": [{"rfilename": WEIGHTS, "size": 1, "lfs": {"x": 1}}],
        },
        *(
            {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": WEIGHTS, "size": size}]}
            for size in ("big", -1, 1e999, 5.5, True, None, 10**400)
        ),
        100_000 * b"[" + 100_000 * b"]",
        {"id": NAME, "sha": 7, "siblings": [{"rfilename": name, "blobId": 7} for name in SERVED]},
    ],
)
def test_json_of_another_shape_is_one_line(hub: Hub, tmp_path: Path, info: object) -> None:
    hub.faults = Faults(info=info)
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 1
    began, error = done.stderr.splitlines()
    assert began == "connecting to the hub …"
    assert error.startswith("error unavailable: ")
    assert "is not a hub" in error


@pytest.mark.parametrize("url", ["http://127.0.0.1:port", "http://a\tb"])
def test_an_endpoint_that_is_no_url_is_one_line(tmp_path: Path, url: str) -> None:
    done = run(None, tmp_path, "pull", NAME, HF_ENDPOINT=url)
    error = done.stderr.removeprefix("connecting to the hub …\n")
    assert (done.returncode, error.count("\n")) == (1, 1)
    assert error.startswith("error ")
    assert "HF_ENDPOINT" in error


def test_an_endpoint_that_the_hubs_library_cannot_read_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://[::1")
    for use in (lambda: find_local(NAME), lambda: pull_model(NAME)):
        with pytest.raises(ConfigError, match="it is not a URL") as raised:
            use()
        assert raised.value.field == "HF_ENDPOINT"


@pytest.mark.parametrize("start", [serve.up, lambda: serve.up(str(DEMO)), lambda: worker("engine")])
def test_no_worker_starts_with_such_an_endpoint(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], start: Callable[[], int]
) -> None:
    """transformers could not be imported, and the worker would be restarted forever."""

    def go_on(*_: object) -> None:
        raise AssertionError("the start goes on")

    monkeypatch.setenv("HF_ENDPOINT", "http://[::1")
    monkeypatch.setattr(settings, "load_config", go_on)
    monkeypatch.setattr(serve, "write_config", go_on)
    assert start() == EXIT_CONFIG
    assert "it is not a URL" in capsys.readouterr().err


def test_a_revision_is_served_from_its_folder(hub: Hub, tmp_path: Path) -> None:
    """The name stands for the main branch."""
    done = run(hub, tmp_path, "pull", NAME, "--revision", COMMIT)
    assert f"`pagemill up {snapshot(tmp_path)}` serves it" in done.stdout


def test_a_slow_transfer_is_never_silent(hub: Hub, tmp_path: Path) -> None:
    hub.faults = Faults(chunk_pause_s=0.065)
    done = run(hub, tmp_path, "pull", NAME)
    assert done.returncode == 0
    assert f"{WEIGHTS}: 5.3 MB\n" in done.stderr
    assert " of 5.3 MB, " in done.stderr


def test_models_lists_what_is_here_and_why_some_is_refused(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path, "pull", NAME).returncode == 0
    t5 = tmp_path / "hf" / "hub" / "models--org--t5" / "snapshots" / COMMIT
    shutil.copytree(snapshot(tmp_path), t5)
    (t5 / "config.json").write_bytes(b'{"model_type": "t5"}')
    partial = tmp_path / "hf" / "hub" / "models--org--partial" / "snapshots" / COMMIT
    shutil.copytree(snapshot(tmp_path), partial)
    (partial / "tokenizer.json").unlink()
    output = run(hub, tmp_path, "models", *NO_BROKER).stdout
    assert "refused: it lacks tokenizer.json" in output
    assert "org/demo     Qwen2-VL  native  5.3 MB  here\n" in output
    rows = {
        row["name"]: row
        for row in map(
            json.loads, run(hub, tmp_path, "models", "--json", *NO_BROKER).stdout.splitlines()
        )
    }
    assert rows.keys() == {"demo", NAME, "org/partial", "org/t5"}
    assert rows["demo"]["state"] == "configured"
    size = sum(len(FILES[name]) for name in SERVED)
    here = {"name": NAME, "family": "Qwen2-VL", "how": "native", "size_bytes": size}
    assert rows[NAME] == here | {"state": "here", "path": str(snapshot(tmp_path))}
    assert rows["org/t5"]["state"] == "refused"
    assert "cross attention" in rows["org/t5"]["reason"]


def test_models_refuses_a_pooling_that_is_not_configured(tmp_path: Path) -> None:
    for file in DEMO.iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "1_Pooling").mkdir()
    for name, content in CLS.items():
        (tmp_path / name).write_bytes(content)
    models = {"own": {"path": "."}, "told": {"path": ".", "pooling": "mean"}}
    (tmp_path / "pagemill.yaml").write_text(json.dumps({"models": models}))
    output = run(None, tmp_path, "models", "--json", *NO_BROKER).stdout
    own, pooled = map(json.loads, output.splitlines())
    assert (own["state"], pooled["state"]) == ("refused", "configured")
    assert own["reason"].startswith("1_Pooling/config.json: pooling_mode: the engine pools")


@pytest.mark.parametrize("options", [(), ("--pull",)])
def test_up_names_what_a_folder_lacks(tmp_path: Path, options: tuple[str, ...]) -> None:
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder)
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": WEIGHTS}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for argument in ("own", "./own", str(folder)):
        done = run(None, tmp_path, "up", argument, *options)
        assert done.returncode == 78
        assert f"{folder} is incomplete, it lacks model-00001-of-00002.safetensors" in done.stderr
        assert "pull" not in done.stderr


def test_up_refuses_what_it_cannot_serve(hub: Hub, tmp_path: Path) -> None:
    for arguments, message in (
        ([NAME], f"run `pagemill pull {NAME}`"),
        (["./nothing"], "there is no folder ./nothing"),
        ([str(DEMO), "--config", "x.yaml"], "exclude each other"),
        (["--max-model-len", "9"], "named on the command line"),
    ):
        done = run(hub, tmp_path, "up", *arguments)
        assert done.returncode == 78, done.stderr
        assert message in done.stderr
    assert hub.requests == []
    folder = tmp_path / "t5"
    shutil.copytree(DEMO, folder)
    (folder / "config.json").write_bytes(b'{"model_type": "t5"}')
    quantized = tmp_path / "quantized"
    shutil.copytree(DEMO, quantized)
    (quantized / "config.json").write_bytes(QUANTIZED["config.json"]["config.json"])
    for refused, message in ((folder, "cross attention"), (quantized, "has quantized weights")):
        done = run(hub, tmp_path, "up", str(refused))
        assert done.returncode == 78
        assert message in done.stderr
        (tmp_path / "pagemill.yaml").write_text(f"models: {{mine: {{path: {refused}}}}}")
        done = run(hub, tmp_path, "check")
        assert done.returncode == 1
        assert f"models.mine.path: {refused} {message}" in done.stderr.replace("uses ", "")
        rows = run(hub, tmp_path, "models", "--json", *NO_BROKER).stdout.splitlines()
        assert [json.loads(row)["state"] for row in rows] == ["refused"]


def test_no_code_of_a_pulled_folder_is_run(hub: Hub, tmp_path: Path) -> None:
    config = json.loads(FILES["config.json"])
    config |= {"model_type": "demo_own", "auto_map": {"AutoConfig": "modeling_demo.DemoConfig"}}
    folder = tmp_path / "own"
    shutil.copytree(DEMO, folder)
    (folder / "config.json").write_text(json.dumps(config))
    mark = tmp_path / "was_run"
    (folder / "modeling_demo.py").write_text(f"open({str(mark)!r}, 'w')\nDemoConfig = object\n")
    done = run_alone(hub, tmp_path, "up", str(folder))
    assert done.returncode == 78
    assert "own is refused" in done.stderr
    assert not mark.exists()


def test_a_folder_of_an_unknown_user_is_refused() -> None:
    with pytest.raises(ConfigError, match="~no-such-user/model: the home directory is unknown"):
        find_local("~no-such-user/model")


@pytest.fixture(scope="module")
def brush(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Files of a model of diffusers, by their names."""
    folder = tmp_path_factory.mktemp("brush")
    qwen_images.write(folder)
    files = [file for file in folder.rglob("*") if file.is_file()]
    return {str(file.relative_to(folder)): file.read_bytes() for file in files}


def test_the_parts_of_a_model_of_diffusers_are_downloaded(
    tmp_path: Path, brush: dict[str, bytes]
) -> None:
    others = {
        "brush.safetensors": b"the same weights again",
        "config.json": b"{}",
        "transformer/diffusion_pytorch_model.fp16.safetensors": b"another form",
        "transformer/model.py": b"raise SystemExit('code of a model was run')",
        "text_encoder/pytorch_model.bin": b"pickled",
        "onnx/vae/config.json": b"{}",
        "../vae/config.json": b"{}",
    }
    unused = {"README.md"} & brush.keys()
    with Hub({"org/brush": brush | others}) as hub:
        done = run(hub, tmp_path, "pull", "org/brush")
    assert done.returncode == 0, done.stderr
    pulled = snapshot(tmp_path, "brush")
    files = {str(file.relative_to(pulled)) for file in pulled.rglob("*") if file.is_file()}
    assert files == brush.keys() - unused
    assert len([name for name in files if name.startswith("transformer/diffusion")]) > 2
    assert read_image_folder(pulled).parts.keys() == {"text_encoder", "transformer", "vae"}


@pytest.mark.parametrize(
    ("file", "key", "value", "reason"),
    [
        ("model_index.json", "_class_name", "OtherPipeline", "'OtherPipeline', which is not"),
        ("vae/config.json", "_class_name", "OtherVAE", "a vae of class 'OtherVAE'"),
        (
            "transformer/config.json",
            "quantization_config",
            {"quant_method": "bitsandbytes"},
            "bitsandbytes",
        ),
    ],
)
def test_weights_of_a_model_of_diffusers_that_is_not_served_are_not_downloaded(
    tmp_path: Path, brush: dict[str, bytes], file: str, key: str, value: object, reason: str
) -> None:
    changed = json.dumps(json.loads(brush[file]) | {key: value}).encode()
    with Hub({"org/brush": brush | {file: changed}}) as hub:
        done = run(hub, tmp_path, "pull", "org/brush")
        assert not hub.downloads(".safetensors")
    assert done.returncode == 1
    assert "weights were not downloaded" in done.stderr
    assert reason in done.stderr
