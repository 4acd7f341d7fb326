"""`make screenshots`: the web pages with real answers, as four images in docs/.

Needs Debian's packages chromium and chromium-driver.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import uvloop
from openai import AsyncOpenAI

from ops.browser import ENTER, MISSING, Browser, browsing
from ops.demo import BATCH, IMAGES
from ops.demo_batch import write_questions
from ops.harness.deployment import demo_tree, deployment
from ops.tool_server import LocalToolServer
from shared.telemetry import logs

DOCS = Path(__file__).parent.parent / "docs"
# Each has a file name, a width, a height and a colour scheme.
SCREENS = [("page.png", 1280, 720, "light"), ("page-phone.png", 390, 844, "dark")]


SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["a"],
    "additionalProperties": False,
}


class ToolServer(LocalToolServer):
    """A server of one tool."""

    def __init__(self) -> None:
        super().__init__({"name": "add", "inputSchema": SCHEMA})

    async def call(self, arguments: dict[str, Any]) -> str:
        return "7"


async def main() -> None:
    logs.configure_logging("warning", role="serving")
    async with deployment(demo_tree(spoken=True) | {"batch": {}}) as site:
        await asyncio.to_thread(take_screenshots, f"{site.http}/", site.folder)
        await asyncio.to_thread(show_batches, f"{site.http}/page/batches.html", site.folder)
    server = {"url": ToolServer().start(), "require_approval": "never"}
    agent = {"servers": {"calc": server}, "mcp_networks": ["127.0.0.0/8"]}
    tree = demo_tree(sampling_defaults={"temperature": 0.0, "max_tokens": 80}) | {"agent": agent}
    async with (
        deployment(tree) as site,
        AsyncOpenAI(base_url=f"{site.http}/v1", api_key="none", max_retries=0) as client,
    ):
        tool: Any = {"type": "mcp", "server_label": "calc", "require_approval": "always"}
        response = await client.responses.create(
            model="demo",
            input="Add a number.",
            tools=[tool],
            tool_choice="required",
            parallel_tool_calls=False,
        )
        url = f"{site.http}/page/response.html#{response.id}"
        await asyncio.to_thread(show_approval, url, site.folder)


def show_approval(url: str, folder: Path) -> None:
    """A response that waited for approval, and the one that has made the call."""
    with browsing(folder) as browser:
        browser.emulate_screen(1280, 720, "light")
        browser.open(url)
        browser.wait("document.querySelector('.decide button') !== null")
        browser.click(".decide button")
        browser.wait("document.querySelectorAll('.response').length === 2")
        last = "document.querySelector('.response:last-child .status')"
        browser.wait(f"!['', 'queued', 'in progress'].includes({last}.innerText)")
        (DOCS / "response.png").write_bytes(browser.screenshot())


def show_batches(url: str, folder: Path) -> None:
    """A batch of a file in which one line is refused, and a batch of one prompt for many images."""
    questions = folder / "questions.jsonl"
    write_questions(questions, [(case.question, IMAGES / case.images[0]) for case in BATCH])
    with questions.open("a") as file:
        line = json.loads(questions.read_text().splitlines()[0])
        line["body"]["temperature"] = -1
        file.write(json.dumps(line | {"custom_id": "refused"}))
    with browsing(folder) as browser:
        browser.emulate_screen(1280, 720, "light")
        browser.open(url)
        browser.wait("!document.querySelector('#send').disabled")
        run_batch(browser, [questions])
        browser.type("#question", "Describe the image.")
        run_batch(browser, sorted(IMAGES.glob("*.png")))
        (DOCS / "batches.png").write_bytes(browser.screenshot())


def run_batch(browser: Browser, files: Sequence[Path]) -> None:
    number = browser.run("return document.querySelectorAll('.batch').length") + 1
    browser.type("#file", "\n".join(map(str, files)))
    browser.wait(f"document.querySelectorAll('#files li').length === {len(files)}")
    browser.click("#send")
    browser.wait(f"document.querySelectorAll('.batch').length === {number}")
    status = "document.querySelector('.batch:first-child .status').innerText"
    browser.wait(f"{status} === 'completed'")


def take_screenshots(url: str, folder: Path) -> None:
    with browsing(folder) as browser:
        for file, width, height, scheme in SCREENS:
            browser.emulate_screen(width, height, scheme)
            browser.open(url)
            browser.wait("!document.querySelector('#speech').hidden")
            ask(browser, "What can you do?")
            browser.run("document.querySelector('#new').click()")
            browser.wait("document.querySelector('.turn') === null")
            ask(browser, "Describe the image.", "yellow_star.jpg")
            browser.run("document.querySelector('.timeline').open = true")
            (DOCS / file).write_bytes(browser.screenshot())


def ask(browser: Browser, question: str, image: str = "") -> None:
    if image:
        browser.type("#file", str(IMAGES / image))
        browser.wait("document.querySelectorAll('#images li').length === 1")
    browser.type("#question", question + ENTER)
    browser.wait("document.querySelector('#send').disabled === false")
    last_stage = ".turn:last-child .stages li:last-child"
    browser.wait(f"document.querySelector('{last_stage}')?.dataset.state === 'done'")
    browser.run("document.activeElement.blur()")


if __name__ == "__main__":
    sys.exit(MISSING or uvloop.run(main()))
