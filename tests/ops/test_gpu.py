"""The run on a GPU machine: its dry mode, its results, and the checks that need no GPU."""

import importlib
import importlib.metadata
import json
import os
import pkgutil
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from ops import gpu
from ops.gpu import host, part_trips, prepare, trip_counter
from ops.gpu.load import Load, Rates, rates_of
from ops.gpu.models import FAMILIES
from ops.gpu.plan import CUDA_TESTS, SECTIONS, Section
from ops.gpu.run import STATUS_OF_LIMIT, Run, choose_sections, main, make_environment
from ops.gpu.summary import LEFT_OUT, read_results, summarise
from ops.gpu.timing import idle_share
from tests import preloaded

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "contribute" / "gpu.md"
MODULES = [module.name for module in pkgutil.walk_packages(gpu.__path__, "ops.gpu.")]


@pytest.mark.parametrize("name", [name for name in MODULES if not name.endswith("__main__")])
def test_every_module_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def test_every_section_has_its_module_or_its_tests() -> None:
    for section in SECTIONS:
        if section.module:
            assert callable(importlib.import_module(section.module).run)
    assert [name for name in CUDA_TESTS if not (ROOT / name).is_file()] == []


def test_the_page_has_a_row_for_every_section() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) s \|", PAGE.read_text(), re.MULTILINE)
    assert rows == [(section.name, str(section.limit_s)) for section in SECTIONS]


# -- runs -----------------------------------------------------------------------------------------


def results_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    "sections", ["env faults", pytest.param("env kernels faults", marks=pytest.mark.long)]
)
def test_the_command_of_a_gpu_machine_runs_sections_without_a_gpu(
    tmp_path: Path, sections: str
) -> None:
    python = tmp_path / "python"
    preloaded.write_python(python)
    environment = os.environ | {"GPU_DRY": "1", "ONLY": sections, "OUT": str(tmp_path / "out")}
    environment["PYTHON"] = str(python)
    command = ["sh", "ops/gpu/device_run.sh"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    log = (tmp_path / "out" / "log.txt").read_text()
    assert done.returncode == 0, done.stdout + done.stderr + log
    results = results_of(tmp_path / "out")
    checks = [result for result in results if result["ok"] is not None]
    assert {result["section"] for result in checks} == set(sections.split())
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert summary.startswith(f"{len(checks)} right, 0 WRONG, 0 sections left out\n")
    assert summary in done.stdout


def test_a_wrong_result_is_first_in_the_summary_and_in_the_exit_status(tmp_path: Path) -> None:
    run = Run(tmp_path, 600, True, make_environment(dry=True))
    assert run.run([Section("planted", 60, "", "tests.ops.planted")]) == 1
    first, *wrong = (tmp_path / "summary.txt").read_text().splitlines()[:3]
    assert first == "2 right, 2 WRONG, 0 sections left out"
    assert wrong[0] == "WRONG  planted: planted: error 0.3333"
    assert wrong[1].startswith("WRONG  planted: failing: error ZeroDivisionError")


def test_a_section_is_killed_at_its_limit_and_the_next_ones_run(tmp_path: Path) -> None:
    endless = Section("endless", 1, "", arguments=("-c", "import time; time.sleep(600)"))
    quick = Section("quick", 60, "", arguments=("-c", "print('seen')"))
    assert Run(tmp_path, 600, False, os.environ).run([endless, quick]) == 1
    assert [result["status"] for result in results_of(tmp_path)] == [STATUS_OF_LIMIT, 0]
    assert "seen" in (tmp_path / "log.txt").read_text()


def test_without_time_sections_are_left_out(tmp_path: Path) -> None:
    assert Run(tmp_path, 1, True, os.environ).run(SECTIONS[:2]) == 0
    assert [result["what"] for result in results_of(tmp_path)] == [LEFT_OUT] * 2


def test_sections_run_in_the_order_of_the_plan() -> None:
    assert [section.name for section in choose_sections("kernels, env")] == ["env", "kernels"]
    assert choose_sections("") == list(SECTIONS)
    with pytest.raises(SystemExit, match="unknown sections: kernel; the sections are env, kernels"):
        choose_sections("kernel env")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    with pytest.raises(SystemExit, match="there is no CUDA device here; try --dry"):
        main([])


# -- results --------------------------------------------------------------------------------------


def test_a_summary_has_wrong_results_then_goals_then_values() -> None:
    ours = {"what": "1.5B, 256 streams", "prefill_tok_s": 900.0, "decode_tok_s": 300.0}
    theirs = {"what": "transformers 1.5B, 256 streams", "prefill_tok_s": 0, "decode_tok_s": 200.0}
    results = [
        {"section": "serving", "ok": None, **ours},
        {"section": "peer", "ok": None, **theirs},
        {"section": "serving", "what": "a step", "ok": None, "idle": 0.02, "goal": "idle <= 0.05"},
        {"section": "kernels", "what": "norm", "ok": True, "error": 1e-6},
        {"section": "kernels", "what": "rotary", "ok": False, "error": 0.5},
    ]
    lines = [json.dumps(result) for result in results]
    assert summarise(read_results([*lines, '{"section": "cut o'])).splitlines() == [
        "1 right, 1 WRONG, 0 sections left out",
        "WRONG  kernels: rotary: error 0.5",
        "goal idle <= 0.05: reached  a step: idle 0.02",
        "goal decode_ratio >= 2: MISSED  1.5B, 256 streams against transformers: decode_ratio 1.5",
        "serving: 1.5B, 256 streams: prefill_tok_s 900, decode_tok_s 300",
        "peer: transformers 1.5B, 256 streams: prefill_tok_s 0, decode_tok_s 200",
    ]


def test_idle_time_is_time_without_a_kernel() -> None:
    assert idle_share([]) == 1
    assert idle_share([(0, 4)]) == 0
    # From 0 to 10 nothing runs in [3, 4] and [6, 9]; kernels may overlap, and come in any order.
    assert idle_share([(4, 6), (0, 3), (1, 2), (9, 10)]) == pytest.approx(0.4)


def test_decoding_counts_while_all_streams_decode() -> None:
    # The second stream has its first token at 3, the first ends at 7.
    rates = rates_of(Load(2, 30, 5), 1.0, [[2, 4, 5, 6, 7], [3, 5, 7, 9, 11]])
    assert rates == Rates(prefill=30.0, decode=6 / 4)


# -- what travels ---------------------------------------------------------------------------------


def test_what_travels_has_the_command_the_commit_and_the_version(tmp_path: Path) -> None:
    prepare.write_kit(tmp_path)
    assert (tmp_path / "device_run.sh").read_text().startswith("#!/bin/sh")
    assert (tmp_path / "commit.txt").read_text().strip()
    (metadata,) = tmp_path.glob("*.dist-info")
    found = importlib.metadata.PathDistribution(metadata)
    assert found.version == importlib.metadata.version("pagemill")


def test_every_wheel_that_travels_has_a_pinned_version() -> None:
    lock = (ROOT / "requirements.lock").read_text()
    pins = prepare.find_pins(lock, [*prepare.WHEELS, *prepare.BUILT])
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    with pytest.raises(SystemExit, match=r"requirements\.lock does not pin no-such-package"):
        prepare.find_pins(lock, ["msgspec", "no-such-package"])


# -- time of the host -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "device_s", "most"),
    [
        ("greedy", 0.0, 5500),
        ("top_p", 0.0, 5500),
        ("temperature", 1e-9, 6000),
        ("penalties", 0.0, 6500),
    ],
)
def test_a_step_of_256_sequences_has_few_python_calls(
    kind: str, device_s: float, most: int
) -> None:
    """Calls do not depend on the machine. A step without a device is not launched ahead."""
    num_calls = {
        num: host.count_calls(host.start(num, 8, host.SAMPLING[kind], device_s)) for num in (16, 48)
    }
    slope = (num_calls[48] - num_calls[16]) / 32
    assert num_calls[16] + 240 * slope < most


# -- copies and synchronisations ------------------------------------------------------------------


META = torch.device("meta")


def read_item(rows: torch.Tensor) -> object:
    return rows[0, 0].item()


def read_sums(rows: torch.Tensor) -> None:
    """Numbers that come from the host alone are known."""
    sums = torch.tensor([2, 3], device=META).cumsum(0)
    sums[torch.arange(1, device=META)] += 1
    assert sums.tolist() == [3, 5]


@pytest.mark.parametrize(
    ("call", "num_copies", "num_syncs"),
    [
        (read_item, 0, 1),
        (lambda rows: rows.argmax(-1).tolist(), 0, 1),
        (lambda rows: bool(rows.isfinite().all()), 0, 1),
        (lambda rows: (rows > 0).nonzero(), 0, 1),
        (lambda rows: torch.unique(rows), 0, 1),
        (lambda rows: rows[torch.tensor([0, 1])], 1, 0),
        (lambda rows: rows[[0, 1]], 1, 0),
        (lambda rows: torch.tensor([1, 2], device=META), 1, 0),
        (lambda rows: torch.as_tensor([1, 2]).to(META), 1, 0),
        (lambda rows: torch.as_tensor([1, 2]).to(META, non_blocking=True), 0, 0),
        (lambda rows: rows * 2 + rows.sum(), 0, 0),
        (read_sums, 1, 1),
    ],
)
def test_round_trips_are_counted(
    call: Callable[[torch.Tensor], object], num_copies: int, num_syncs: int
) -> None:
    record = trip_counter.Record()
    rows = torch.zeros(3, 4, device=META)
    with trip_counter.counting(record):
        call(rows)
    assert (record.copies.total(), record.syncs.total()) == (num_copies, num_syncs)
    assert not record.problems


def test_an_operation_on_tensors_of_two_devices_is_a_problem() -> None:
    record = trip_counter.Record()
    rows = torch.zeros(3, 4, device=META)
    with trip_counter.counting(record):
        rows @ torch.ones(4, 2)
    assert record.problems.total() == 1


@pytest.mark.parametrize(
    ("families", "kinds"), [(["qwen2"], []), (FAMILIES, ["greedy", "images", "adapters"])]
)
def test_no_graph_holds_a_round_trip_and_a_step_has_no_more_than_before(
    families: Sequence[str], kinds: Sequence[str]
) -> None:
    """No operation mixes devices."""
    command = [*preloaded.PYTHON, "-m", "ops.gpu", "round-trips", *families]
    command += ["--kinds", *kinds] if kinds else []
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"{family}: ok" in done.stdout for family in families)


GENERIC = [
    name for name in part_trips.GENERIC if name not in ("glm4v", "mistral3", "musicflamingo")
]
FURTHER_PARTS = ["token2wav", *GENERIC, *part_trips.PAINTERS[1:-1]]
"""A vocoder with many operations, and towers and painters that share their copies with others."""


@pytest.mark.parametrize(
    "parts",
    [
        [name for name in part_trips.PARTS if name not in FURTHER_PARTS],
        pytest.param(FURTHER_PARTS, marks=pytest.mark.long),
    ],
    ids=["most", "further"],
)
def test_no_tower_and_no_generator_waits_for_the_device_more_often_than_before(
    parts: list[str],
) -> None:
    command = [*preloaded.PYTHON, "-m", "ops.gpu", "part-trips", *parts]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok\n") == len(parts)
