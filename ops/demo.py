"""`make demo`: run the complete system on this machine, and show its answers as they arrive.

Starts nats-server and a process for each stage of the demo model, sends three questions about
images, one about a clip, one about a sound and one without media, all at once. Then it requests a
spoken answer, an image, a name that only a tool knows, and twelve answers about images as one
batch. Exits 0 only if all answers are right.
"""

import argparse
import asyncio
import contextlib
import io
import sys
import tempfile
import time
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import uvloop
from msgspec.structs import replace
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.status import Status
from rich.table import Table

from ops.demo_agent import LABEL, NAMES, NameServer, ToolAnswer, ask_with_tool
from ops.demo_batch import BatchAnswers, run_batch, write_questions
from ops.demo_media import DemoFailed, Painting, Speech, paint, speak
from ops.harness.deployment import Deployment, deployment, preload_for
from shared.bus.bus import Bus
from shared.client import ask, new_request_id
from shared.errors import PagemillError
from shared.protocol.records import Failure, Finish, LogRecord, StageSpan, TokenChunk
from shared.telemetry import logs
from workers import settings
from workers.cli.ask import build_request, media_parts, with_media
from workers.cli.inputs import read_input
from workers.cli.token_rate import TokenRate
from workers.supervisor.preloader import Preloader

OPS = Path(__file__).parent
IMAGES, RECORDINGS = OPS / "demo_images", OPS / "demo_recordings"
HEARING = OPS / "demo_hearing" / "pagemill.yaml"
SPEECH_FILE = Path("data") / "demo" / "answer.wav"
IMAGE_FILE = SPEECH_FILE.with_name("image.png")
# Any seed would do.
PROMPT, SEED = "a red circle on blue", 1
LETTER, WHOSE = IMAGES / "letter_k.png", "Whose letter is this?"
NUM_LINES = 12
RED, BLUE = (255, 0, 0), (0, 0, 255)
STARTING = "starting nats-server and the workers; the first start compiles kernels, once"
# Seconds between lines of a start that is no terminal's.
SILENT_S = 5
NEXT = "next: . .venv/bin/activate && pagemill up, or pagemill run ORG/NAME for another model"
console = Console()


class Case(msgspec.Struct, frozen=True):
    """A question, and the words that a right answer contains."""

    images: list[str]
    question: str
    expect: str
    video: str | None = None
    audio: str | None = None
    model: str = "demo"

    @property
    def files(self) -> list[str]:
        return [*self.images, *filter(None, (self.video, self.audio))]


CLIP = Case([], "Which way does the star move?", "right", video="star_moves_right.webp")
SOUND = Case([], "Which digit is spoken?", "7", audio="seven.flac", model="hearing")
CASES = msgspec.json.decode((IMAGES / "questions.json").read_bytes(), type=list[Case])
BATCH = [case for case in CASES if len(case.images) == 1][:NUM_LINES]


@dataclass
class Progress:
    """State of one request. All times are from the clock of this process."""

    case: Case
    sent_s: float = 0.0
    rate: TokenRate = field(default_factory=TokenRate)
    answer: str = ""
    final: Finish | Failure | None = None

    def add(self, record: LogRecord) -> None:
        if isinstance(record, TokenChunk):
            num_tokens = sum(len(choice.token_ids) for choice in record.choices)
            self.rate.add(num_tokens, time.perf_counter())
            self.answer += "".join(choice.text for choice in record.choices)
        else:
            self.final = record

    @property
    def is_right(self) -> bool:
        return isinstance(self.final, Finish) and self.case.expect in self.answer.lower()


@dataclass
class Demo:
    """All requests of the demo, and their tables."""

    cases: list[Case]
    progress: list[Progress] = field(default_factory=list)
    speech: Speech | None = None
    painting: Painting | None = None
    with_tool: ToolAnswer | None = None
    batch: BatchAnswers | None = None

    async def run(self, site: Deployment) -> None:
        """Send all questions at once and show the answers; then speak, paint, use the tool, and run
        a batch."""
        self.progress = [Progress(case) for case in self.cases]
        async with site.bus("demo") as bus:
            with Live(self.live_table(), console=console, refresh_per_second=20) as live:
                await asyncio.gather(*(self._ask(bus, state, live) for state in self.progress))
            spoken = self.cases[-1]
            images = [IMAGES / name for name in spoken.images]
            request = build_request("demo", spoken.question, images, {})
            self.speech = await speak(bus, replace(request, outputs=["text", "audio"]))
            self.painting = Painting(await paint(bus, PROMPT, SEED), RED, BLUE)
            self.with_tool = await ask_with_tool(site.http, LETTER, WHOSE)
            questions = [(case.question, IMAGES / case.images[0]) for case in BATCH]
            file = site.folder / "questions.jsonl"
            write_questions(file, questions)
            self.batch = await run_batch(bus, site.config, file)

    async def _ask(self, bus: Bus, state: Progress, live: Live) -> None:
        case = state.case
        images = [IMAGES / name for name in case.images]
        recordings = (name for name in (case.video, case.audio) if name)
        _, media = read_input(" ".join(f'@"{RECORDINGS / name}"' for name in recordings))
        request = build_request(case.model, case.question, images, {})
        request = with_media(request, await media_parts(bus, media))
        state.sent_s = time.perf_counter()
        async for record in ask(bus, request, new_request_id()):
            state.add(record)
            live.update(self.live_table())

    def live_table(self) -> Table:
        table = Table(box=None, pad_edge=False)
        for name in ("files", "question", "answer"):
            table.add_column(name)
        table.add_column("tokens", justify="right")
        table.add_column("tok/s", justify="right")
        for state in self.progress:
            files = ", ".join(state.case.files) or "—"
            answer = f"[{_colour(state)}]{state.answer}[/]"
            table.add_row(
                files, state.case.question, answer, str(state.rate.num_tokens), str(state.rate)
            )
        return table

    def summary(self) -> Table:
        table = Table(title="from question to answer", title_justify="left")
        for name in ("question", "first token", "tokens/s", "KV blocks"):
            table.add_column(name, justify="left" if name == "question" else "right")
        table.add_column("path (time in each worker)")
        for state in self.progress:
            waited_ms = 1000 * (state.rate.first_s - state.sent_s)
            first = f"{waited_ms:.0f} ms" if state.rate.num_tokens else "—"
            blocks = str(state.final.kv_blocks) if isinstance(state.final, Finish) else "—"
            path = " → ".join(_format_span(s) for s in state.final.path) if state.final else "—"
            table.add_row(state.case.question, first, str(state.rate), blocks, path)
        return table


def _colour(state: Progress) -> str:
    if state.final is None:
        return "yellow"
    return "green" if state.is_right else "red"


def _format_span(span: StageSpan) -> str:
    return f"{span.stage} {span.sent_ms - span.received_ms:.0f} ms"


def pick_cases() -> list[Case]:
    """Return three questions about images, one about a clip, one about a sound, one without
    media."""
    with_images = [case for case in CASES if case.images]
    return [*with_images[:3], CLIP, SOUND, next(case for case in CASES if not case.images)]


def _save_svg(demo: Demo, file: Path) -> None:
    """Save the final terminal output as an SVG for the documents."""
    recorder = Console(record=True, width=118, file=io.StringIO())
    recorder.print("$ make demo\n", demo.live_table(), "", demo.summary())
    if demo.speech is not None:
        recorder.print(f"\n{describe(demo.speech)}\n{demo.speech.draw()}")
    if demo.painting is not None:
        recorder.print(f"\npainted: {PROMPT} (in {IMAGE_FILE})", demo.painting.draw(), sep="\n")
    recorder.save_svg(str(file), title="pagemill", clear=False)


def describe(speech: Speech) -> str:
    length = f"{speech.length_s:.1f} s at {speech.loudness_db:.0f} dB of full scale"
    return f"spoken: {speech.text} ({length}, in {SPEECH_FILE})"


def show_speech(speech: Speech, expect: str) -> bool:
    """Save and draw a spoken answer; return whether it is right."""
    SPEECH_FILE.parent.mkdir(parents=True, exist_ok=True)
    with wave.open(str(SPEECH_FILE), "wb") as file:
        file.setparams((1, 2, speech.sample_rate, 0, "NONE", ""))
        file.writeframes(speech.samples.tobytes())
    fault = speech.find_fault()
    if fault is None and expect not in speech.text.lower():
        fault = "this is not the right answer"
    console.print(f"\n{describe(speech)}", highlight=False)
    console.print(speech.draw(), style="cyan", highlight=False)
    if fault is not None:
        console.print(f"[red]the speech is wrong[/]: {fault}")
    return fault is None


def show_painting(painting: Painting) -> bool:
    """Save and draw the image; return whether its colours are right."""
    IMAGE_FILE.parent.mkdir(parents=True, exist_ok=True)
    IMAGE_FILE.write_bytes(painting.png)
    console.print(f"\npainted: {PROMPT} (in {IMAGE_FILE})", highlight=False)
    console.print(painting.draw(), end="")
    fault = painting.find_fault()
    if fault is not None:
        console.print(f"[red]the image is wrong[/]: {fault}")
    return fault is None


def show_call(answer: ToolAnswer) -> bool:
    """Print an answer with a tool; return whether it is right."""
    console.print(f"\nwith a tool: {answer.question} ({LETTER.name})", highlight=False)
    for call, output in zip(answer.calls, answer.outputs, strict=True):
        console.print(f"  {call} → {output}", highlight=False, markup=False)
    console.print(f"  {answer.text}", highlight=False, markup=False)
    fault = answer.find_fault(NAMES["k"])
    if fault is not None:
        console.print(f"[red]the answer is wrong[/]: {fault}")
    return fault is None


def show_batch(batch: BatchAnswers) -> bool:
    """Print the outcome of the batch; return whether all its answers are right."""
    wrong = [
        f"{case.question} ({case.images[0]}) {batch.texts.get(number, 'no answer')}"
        for number, case in enumerate(BATCH)
        if case.expect not in batch.texts.get(number, "").lower()
    ]
    right = len(BATCH) - len(wrong)
    console.print(
        f"\nbatch {batch.status}: {right} of {len(BATCH)} answers about images are right, in"
        f" {batch.took_s:.1f} s",
        highlight=False,
    )
    for answer in wrong:
        console.print(f"[red]wrong[/]: {escape(answer)}", highlight=False)
    return not wrong and batch.status == "completed"


async def run_demo(
    demo: Demo, tree: dict[str, Any], folder: Path, preloader: Preloader | None
) -> None:
    """Run the questions on a separate deployment. Raises PagemillError and DemoFailed."""
    began = time.perf_counter()
    async with contextlib.AsyncExitStack() as stack:
        with console.status(STARTING) as status:
            waiting = asyncio.create_task(_count_seconds(status, began))
            site = await stack.enter_async_context(
                deployment(tree, folder=folder, preloader=preloader)
            )
            waiting.cancel()
            console.print(f"ready after {time.perf_counter() - began:.1f} s at {site.url}\n")
        await demo.run(site)


async def _count_seconds(status: Status, began_s: float) -> None:
    """Show how long the start has taken, until this is cancelled."""
    while True:
        seconds = time.perf_counter() - began_s
        text = f"{STARTING}, {seconds:.0f} s"
        status.update(text)
        if not console.is_terminal and seconds >= 1:
            console.print(text, highlight=False)
        await asyncio.sleep(1 if console.is_terminal else SILENT_S)


def report(demo: Demo) -> int:
    """Print the answers, and return the exit code."""
    console.print()
    console.print(demo.summary())
    for state in demo.progress:
        if isinstance(state.final, Failure):
            console.print(f"[red]{state.final.error.code}[/]: {state.final.error.message}")
    spoken_right = demo.speech is not None and show_speech(demo.speech, demo.cases[-1].expect)
    painted_right = demo.painting is not None and show_painting(demo.painting)
    called_right = demo.with_tool is not None and show_call(demo.with_tool)
    batch_right = demo.batch is not None and show_batch(demo.batch)
    right = sum(state.is_right for state in demo.progress)
    right += spoken_right + painted_right + called_right + batch_right
    num = len(demo.cases) + 4
    verdict = f"{right} of {num} answers are right"
    console.print(f"[bold {'green' if right == num else 'red'}]{verdict}[/]")
    console.print(NEXT, highlight=False, soft_wrap=True)
    return 0 if right == num else 1


def demo_config(tool_url: str) -> dict[str, Any]:
    """Return the embedded configuration with the model that hears, the tool, and batches."""
    tree: dict[str, Any] = msgspec.yaml.decode(settings.EMBEDDED)
    [(name, hearing)] = msgspec.yaml.decode(HEARING.read_bytes())["models"].items()
    tree["models"][name] = hearing | {"path": str(HEARING.parent)}
    server = {"url": tool_url, "require_approval": "never"}
    agent = {"servers": {LABEL: server}, "mcp_networks": ["127.0.0.0/8"]}
    return tree | {"agent": agent, "batch": {}}


def main(svg: Path | None) -> int:
    demo, tool = Demo(pick_cases()), NameServer()
    logs.configure_logging("warning", role="demo")
    with tempfile.TemporaryDirectory(prefix="pagemill-demo-") as name:
        folder, tree = Path(name), demo_config(tool.start())
        try:
            uvloop.run(run_demo(demo, tree, folder, preload_for(tree, folder)))
        except (PagemillError, DemoFailed) as error:
            console.print(f"[red]{getattr(error, 'code', 'failed')}[/]: {error}")
            log = folder / "workers.log"
            console.print(log.read_text() if log.exists() else "", markup=False)
        finally:
            tool.stop()
    code = report(demo)
    if svg is not None:
        _save_svg(demo, svg)
    return code


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Run the complete system on this machine.")
    parser.add_argument("--svg", type=Path, help="save the terminal output to this file")
    try:
        sys.exit(main(parser.parse_args().svg))
    except KeyboardInterrupt:
        console.print("stopped")
        sys.exit(130)
