"""The web page in a headless browser, and what tests read from it."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ops.browser import ENTER, MISSING, Browser, browsing
from tests.gateway.conftest import Gateway
from tests.npm import install

needs_browser = [
    pytest.mark.skipif(
        MISSING is not None, reason="needs Debian's packages chromium and chromium-driver"
    ),
    pytest.mark.timeout(180),
]

LAST = ".turn:last-child"
LAST_ERROR = f"document.querySelector('{LAST} .error')"
ERRORS = (
    "[...document.querySelectorAll('.error:not([hidden]), .fault')].map((box) => box.innerText)"
)
# Seconds of text: its end comes long after its beginning is shown.
LONG = '{"ignore_eos": true, "max_tokens": 900, "temperature": 0}'
STAGES = (
    "[...document.querySelectorAll('.turn:last-child .stages li:not([hidden])')]"
    ".map((row) => row.dataset.state)"
)
TIMES = (
    "[...document.querySelectorAll('.turn:last-child .stages li:not([hidden]) .stage-head')]"
    ".map((head) => head.innerText)"
)
# The lowest contrast of any text with its background, as WCAG defines it.
CONTRAST = """
const numbers = (color) => color.match(/[\\d.]+/g).map(Number);
const light = (rgb) => rgb.slice(0, 3)
  .map((c) => c / 255).map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4)
  .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
const behind = (element) => {
  const rgba = numbers(getComputedStyle(element).backgroundColor);
  return rgba[3] === 0 ? behind(element.parentElement) : rgba;
};
const shown = (element) => element.checkVisibility() && !element.matches(":disabled, option");
const texts = [...document.querySelectorAll("body *")].filter((element) => shown(element)
  && [...element.childNodes].some((node) => node.nodeType === 3 && node.data.trim()));
return texts.map((element) => {
  const [a, b] = [light(numbers(getComputedStyle(element).color)), light(behind(element))];
  return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), element.outerHTML];
}).sort((a, b) => a[0] - b[0])[0];
"""

FIND_VIOLATIONS = """;
return axe.run().then(({ violations }) =>
  violations.map(({ id, nodes }) => [id, ...nodes.map(({ html }) => html)]));
"""


@pytest.fixture(scope="session")
def axe(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The script of axe-core, which finds violations of accessibility rules."""
    folder = tmp_path_factory.mktemp("axe")
    shutil.copytree(Path(__file__).parent / "axe", folder, dirs_exist_ok=True)
    install(folder)
    return (folder / "node_modules/axe-core/axe.min.js").read_text()


def violations(page: Browser, axe: str) -> list[list[str]]:
    """Return the broken rules, each followed by the HTML of its elements."""
    found: list[list[str]] = page.run(axe + FIND_VIOLATIONS)
    return found


@pytest.fixture(scope="session")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, gateway: Gateway) -> Iterator[Browser]:
    """A page that was just loaded, with the form enabled."""
    visit(window, gateway.url)
    yield window
    # The browser also reports a server that refuses a request or does not answer.
    errors = [line for line in window.console_errors() if "Failed to load resource" not in line]
    assert errors == []


def visit(window: Browser, url: str) -> None:
    window.emulate_screen(1200, 900, "light")
    window.open(f"{url}/")
    window.wait("!document.querySelector('#send').disabled")
    # The window still has the conversations of an earlier test.
    window.run("localStorage.clear(); dispatchEvent(new Event('storage'))")
    window.console_errors()


def ask(page: Browser, question: str, parameters: str = "{}") -> None:
    page.run("document.querySelector('#more').value = arguments[0]", parameters)
    page.type("#question", question + ENTER)


def ended(page: Browser) -> str:
    """Return the status line of a complete answer."""
    page.wait("document.querySelector('#send').disabled === false", timeout_s=90)
    page.run("document.querySelectorAll('.timeline').forEach((box) => { box.open = true; })")
    return page.text(f"{LAST} .status")


def answer_of(page: Browser) -> str:
    return str(page.run("return document.querySelector('.turn:last-child .text').textContent"))


def wait_for_text(page: Browser) -> None:
    page.wait("document.querySelector('.turn:last-child .text')?.textContent.length > 20")
