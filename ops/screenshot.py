"""`make screenshots`: the web page with a true answer, as docs/page.png and docs/page-phone.png.

Needs Debian's packages chromium and chromium-driver.
"""

import asyncio
import sys
import tempfile
from pathlib import Path

import msgspec
import uvloop

from ops.browser import ENTER, MISSING, Browser, browsing
from ops.demo import PICTURES
from shared import telemetry
from workers import settings
from workers.local import LocalCluster, WorkerSpec, default_workers

DOCS = Path(__file__).parent.parent / "docs"
# File, width, height and colour scheme.
SCREENS = [("page.png", 1200, 860, "light"), ("page-phone.png", 390, 844, "dark")]


async def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = settings.load_config(None)
        nats = msgspec.structs.replace(config.nats, store_dir=str(folder / "nats"), port=0)
        config = msgspec.structs.replace(config, nats=nats)
        telemetry.setup("warning", role="screenshot")
        workers = [*default_workers(config), WorkerSpec("gateway")]
        cluster = LocalCluster(config, None, workers, log_file=folder / "workers.log")
        try:
            await cluster.start()
            await asyncio.to_thread(photograph, f"{cluster.door}/", folder)
        finally:
            await cluster.stop()


def photograph(url: str, folder: Path) -> None:
    with browsing(folder) as browser:
        for file, width, height, scheme in SCREENS:
            browser.appear(width, height, scheme)
            browser.open(url)
            browser.wait("!document.querySelector('#send').disabled")
            ask(browser)
            (DOCS / file).write_bytes(browser.screenshot())


def ask(browser: Browser) -> None:
    browser.type("#file", str(PICTURES / "three_squares.png"))
    browser.wait("document.querySelectorAll('#pictures li').length === 1")
    browser.type("#question", "How many shapes are there?" + ENTER)
    browser.wait("document.querySelector('#stages li:last-child').dataset.state === 'done'")
    browser.run("document.activeElement.blur()")


if __name__ == "__main__":
    sys.exit(MISSING or uvloop.run(main()))
