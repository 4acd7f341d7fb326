"""The order of a run: all peers of a model are loaded, and take turns at each repetition.

A slow minute of the machine then affects all of them. If they do not fit into the memory together,
they run one after the other, each with all its repetitions.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from ops.bench.peers.floors import Limits, Shape, Work
from ops.bench.peers.process import Measured, PeerFailed, PeerProcess
from ops.bench.peers.protocol import Request, Setup
from ops.bench.peers.records import Repetition, Row
from ops.bench.peers.roster import Spec
from ops.bench.peers.workloads import Workload
from ops.harness import machine

NUM_COMPARED, NUM_COMPARED_TOKENS = 2, 8
# Requests of a warm-up, for a peer that compiles nothing.
NUM_WARM = 2
# Number of the repetition that is the warm-up, with separate prompts.
WARM_UP = 0
# Memory in multiples of the weights: these, a copy in the peer's own layout, the peak of loading.
COPIES = 3
IMAGE_PLACE = 28
"""Side in pixels of the area that becomes one token of a Qwen2-VL."""


@dataclass(frozen=True, slots=True)
class Plan:
    peers: Path
    models: Path
    specs: Sequence[Spec]
    workloads: Sequence[Workload]
    repetitions: int
    setup: Setup
    """Settings of all peers, without the folder of the model, which differs between peers."""
    logs: Path
    log: Callable[[str], None]


def limits(threads: int) -> Limits:
    """Measure the machine as it is now, in a process that then frees its memory."""
    command = [sys.executable, "-m", "ops.bench.peers.limits", str(threads)]
    output = subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout
    return msgspec.json.decode(output, type=Limits)


def measure_model(plan: Plan, model: str) -> list[Row]:
    together = _fits(plan, model)
    groups = [list(plan.specs)] if together else [[spec] for spec in plan.specs]
    if not together:
        plan.log(f"{model}: not enough memory for all at once: one after the other")
    return [row for group in groups for row in _Session(plan, model, group).measure()]


def _fits(plan: Plan, model: str) -> bool:
    weights = sum(f.stat().st_size for f in (plan.models / model).glob("*.safetensors"))
    needed = sum(COPIES * weights + spec.extra_bytes for spec in plan.specs)
    return needed < machine.available_bytes()


class _Session:
    """Some peers with one model; a peer that fails is left out from then on."""

    def __init__(self, plan: Plan, model: str, specs: Sequence[Spec]) -> None:
        self._plan = plan
        self._model = model
        config = json.loads((plan.models / model / "config.json").read_text())
        self._shape = Shape.of(config)
        self._vocab_size: int = config.get("text_config", config)["vocab_size"]
        self._specs = list(specs)
        # The key has the model's folder, because a peer may need another one for images.
        self._processes: dict[tuple[Spec, Path], PeerProcess] = {}

    def measure(self) -> list[Row]:
        rows = []
        workloads = [w for w in self._plan.workloads if self._shape.patch_side or not w.image_side]
        try:
            for workload in workloads:
                with tempfile.TemporaryDirectory(prefix="pagemill-bench-") as folder:
                    rows += self._measure(workload, Path(folder))
        finally:
            for process in self._processes.values():
                process.stop()
        return rows

    def _measure(self, workload: Workload, images: Path) -> list[Row]:
        processes = {spec: self._process(spec, workload) for spec in list(self._specs)}
        taking_part = {spec: p for spec, p in processes.items() if p is not None}
        measured: dict[Spec, list[Measured]] = {spec: [] for spec in taking_part}
        batches: list[list[Request]] = []
        for number in range(WARM_UP, WARM_UP + 1 + self._plan.repetitions):
            requests = workload.requests(number, self._vocab_size, images)
            if number > WARM_UP:
                batches.append(requests)
            for spec in list(measured):
                brief = number == WARM_UP and not spec.compiles
                run = self._run(taking_part[spec], requests[:NUM_WARM] if brief else requests)
                if run is None:
                    del measured[spec]
                elif number > WARM_UP:
                    measured[spec].append(run)
                    self._report(workload, spec, f"{run.result.wall_s:.2f} s")
        work = _work(workload, batches, [run for runs in measured.values() for run in runs])
        return [
            self._row(workload, work, taking_part[spec], runs) for spec, runs in measured.items()
        ]

    def _process(self, spec: Spec, workload: Workload) -> PeerProcess | None:
        python = spec.python(self._plan.peers)
        images = bool(workload.image_side)
        folder = spec.folder(self._plan.models, self._model, images=images)
        if python is None or folder is None:
            self._report(workload, spec, "not installed, or not for this")
            return None
        if (spec, folder) not in self._processes:
            setup = replace(self._plan.setup, model=str(folder))
            try:
                process = PeerProcess(spec, python, setup, self._plan.logs)
            except PeerFailed as failure:
                self._drop(spec, failure)
                return None
            self._processes[spec, folder] = process
            self._report(workload, spec, f"ready after {process.start_s:.1f} s")
        return self._processes[spec, folder]

    def _run(self, process: PeerProcess, requests: list[Request]) -> Measured | None:
        try:
            return process.run(requests)
        except PeerFailed as failure:
            self._drop(process.spec, failure)
            return None

    def _drop(self, spec: Spec, failure: PeerFailed) -> None:
        self._specs.remove(spec)
        self._plan.log(f"{self._model}: {spec.name} takes no further part: {failure}")

    def _report(self, workload: Workload, spec: Spec, news: str) -> None:
        self._plan.log(f"{self._model} {workload.name}: {spec.name}: {news}")

    def _row(
        self, workload: Workload, work: Work, process: PeerProcess, runs: list[Measured]
    ) -> Row:
        answers = runs[-1].result.answers[:NUM_COMPARED]
        return Row(
            self._model,
            workload.name,
            process.spec.name,
            self._shape,
            work,
            [Repetition.of(run.result, run.other_cpu) for run in runs],
            process.start_s,
            process.peak_bytes,
            [answer.token_ids[:NUM_COMPARED_TOKENS] for answer in answers],
        )


def _work(workload: Workload, batches: list[list[Request]], runs: Iterable[Measured]) -> Work:
    """Return the shape of a repetition; prompts of tokens have their mean length over all."""
    requests = batches[-1]
    num_tokens = sum(len(r.token_ids) for batch in batches for r in batch) // len(batches)
    if workload.image_side:
        # Only the peer that applied the template knows the length of a prompt with an image.
        lengths = [a.num_prompt_tokens or 0 for run in runs for a in run.result.answers]
        of_images = (workload.image_side // IMAGE_PLACE) ** 2
        num_tokens = len(requests) * max(lengths, default=of_images)
    shared = workload.shared_prefix_len * (len(requests) - 1)
    pixels = len(requests) * workload.image_side**2
    return Work(len(requests), requests[0].max_tokens, num_tokens - shared, pixels)
