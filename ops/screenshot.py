"""`make screenshots`: the web page with a real answer, as docs/page.png and docs/page-phone.png.

Needs Debian's packages chromium and chromium-driver.
"""

import asyncio
import sys
from pathlib import Path

import uvloop

from ops.browser import ENTER, MISSING, Browser, browsing
from ops.demo import IMAGES
from ops.serving import serving

DOCS = Path(__file__).parent.parent / "docs"
# Each has a file name, a width, a height and a colour scheme.
SCREENS = [("page.png", 1200, 850, "light"), ("page-phone.png", 390, 844, "dark")]


async def main() -> None:
    async with serving() as (url, folder):
        await asyncio.to_thread(take_screenshots, f"{url}/", folder)


def take_screenshots(url: str, folder: Path) -> None:
    with browsing(folder) as browser:
        for file, width, height, scheme in SCREENS:
            browser.emulate_screen(width, height, scheme)
            browser.open(url)
            browser.wait("!document.querySelector('#send').disabled")
            ask(browser)
            ask(browser)  # The second answer shows no time for loading.
            (DOCS / file).write_bytes(browser.screenshot())


def ask(browser: Browser) -> None:
    browser.run("document.querySelector('#images button')?.click()")
    browser.type("#file", str(IMAGES / "yellow_star.jpg"))
    browser.wait("document.querySelectorAll('#images li').length === 1")
    browser.run("document.querySelector('#question').value = ''")
    browser.type("#question", "Describe the image." + ENTER)
    browser.wait("document.querySelector('#send').disabled === false")
    browser.wait("document.querySelector('#stages li:last-child').dataset.state === 'done'")
    browser.run("document.activeElement.blur()")


if __name__ == "__main__":
    sys.exit(MISSING or uvloop.run(main()))
