"""The web page in a real browser, against a whole Pagemill and its demo model."""

import hashlib
import os
import re
import signal
from collections.abc import Iterator

import pytest

from ops.browser import ENTER, ESCAPE, MISSING, TAB, Browser, browsing
from ops.demo import IMAGES
from shared.bus.bus import Bus
from tests.cluster.conftest import CONFIG, Cluster, start_cluster, stop_cluster
from tests.gateway.conftest import Gateway, Start, free_port, start_gateway

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=str(MISSING)),
    pytest.mark.timeout(180),
]

# Seconds of text: its end comes long after its beginning is shown.
LONG = '{"ignore_eos": true, "max_tokens": 900, "temperature": 0}'
STAGES = (
    "[...document.querySelectorAll('#stages li:not([hidden])')].map((row) => row.dataset.state)"
)
TIMES = (
    "[...document.querySelectorAll('#stages li:not([hidden]) .stage-head')].map((e) => e.innerText)"
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


@pytest.fixture(scope="module")
def window(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def page(window: Browser, gateway: Gateway) -> Iterator[Browser]:
    """A page that was just loaded, with the form enabled."""
    visit(window, gateway.url)
    yield window
    # The browser also reports a server that refuses a request or does not answer.
    told = [line for line in window.console_errors() if "Failed to load resource" not in line]
    assert told == []


def visit(window: Browser, url: str) -> None:
    window.emulate_screen(1200, 900, "light")
    window.open(f"{url}/")
    window.wait("!document.querySelector('#send').disabled")


def ask(page: Browser, question: str, parameters: str = "{}") -> None:
    page.run("document.querySelector('#settings').open = true")
    page.run("document.querySelector('#more').value = arguments[0]", parameters)
    page.type("#question", question + ENTER)


def ended(page: Browser) -> str:
    """Return the status line of a complete answer."""
    page.wait("document.querySelector('#send').disabled === false", timeout_s=90)
    return page.text("#status")


def answer_of(page: Browser) -> str:
    return str(page.run("return document.querySelector('#answer').textContent"))


def wait_for_text(page: Browser) -> None:
    page.wait("document.querySelector('#answer').textContent.length > 20")


def test_a_question_about_an_image(page: Browser) -> None:
    page.type("#file", str(IMAGES / "red.png"))
    page.wait("document.querySelectorAll('#images li').length === 1")
    ask(page, "What color is this image? Answer in one word.")
    assert ended(page).startswith("Done in ")
    assert "red" in answer_of(page).lower()
    page.wait(f"{STAGES}.join() === 'done,done,done'")
    times = page.run(f"return {TIMES}")
    assert [text.split()[0] for text in times] == ["Coordinator", "Renderer", "Engine"]
    assert all(re.search(r"\d m?s$", text) for text in times)
    for fact in ("#first", "#tokens", "#prompt", "#request"):
        assert re.search(r"\d", page.text(fact)), fact
    assert page.text("#resumed") == "never"


def test_an_encoder_is_shown_as_a_stage(
    window: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    cluster = start_cluster(
        tmp_path_factory.mktemp("encoding"),
        CONFIG.replace("max_model_len:", "tower: encoder\n    max_model_len:"),
    )
    gateway = start_gateway(cluster, tmp_path_factory.mktemp("gateway"))
    try:
        visit(window, gateway.url)
        window.type("#file", str(IMAGES / "red.png"))
        window.wait("document.querySelectorAll('#images li').length === 1")
        ask(window, "What color is this image? Answer in one word.")
        assert ended(window).startswith("Done in ")
        window.wait(f"{STAGES}.join() === 'done,done,done,done'")
        times = window.run(f"return {TIMES}")
        assert [text.split()[0] for text in times] == [
            *("Coordinator", "Renderer", "Encoder", "Engine")
        ]
        assert all(re.search(r"\d m?s$", text) for text in times)
    finally:
        gateway.stop()
        stop_cluster(cluster)


def test_images_are_dropped_and_removed(page: Browser) -> None:
    page.run(
        """
        const bytes = Uint8Array.from(atob(arguments[0]), (c) => c.charCodeAt(0));
        const files = new DataTransfer();
        files.items.add(new File([bytes], "a.png", { type: "image/png" }));
        files.items.add(new File(["no picture"], "b.txt", { type: "text/plain" }));
        document.querySelector(".drop-label").dispatchEvent(
          new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
        """,
        "iVBORw0KGgo=",
    )
    page.wait("document.querySelectorAll('#images li').length === 1")
    page.click("#images button")
    page.wait("document.querySelectorAll('#images li').length === 0")
    assert page.run("return document.activeElement.id") == "file"


def test_tokens_and_stages_are_shown_during_a_request(page: Browser) -> None:
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    page.wait(f"{STAGES}.join() === 'done,done,active'")
    lengths = [len(answer_of(page))]
    while page.run("return document.querySelector('#answer').ariaBusy") == "true":
        lengths.append(len(answer_of(page)))
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    assert page.text("#tokens") == "900 tokens"
    assert float(page.text("#rate")) > 0


@pytest.mark.parametrize("way", ["button", "escape"])
def test_cancel(page: Browser, way: str) -> None:
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    if way == "button":
        page.click("#cancel")
    else:
        page.press(ESCAPE)
    assert ended(page) == "Cancelled"
    script = "return fetch('v1/requests/' + arguments[0]).then((answer) => answer.json())"
    assert page.run(script, page.text("#request"))["state"] == "cancelled"
    assert page.run("return document.querySelector('#error').hidden")


def test_it_resumes_when_the_gateway_is_killed(window: Browser, another: Start) -> None:
    port = free_port()
    gateway = another(port)
    visit(window, gateway.url)
    ask(window, "What can you do?", LONG)
    assert ended(window).startswith("Done")
    undisturbed = answer_of(window)
    ask(window, "", LONG)
    wait_for_text(window)
    gateway.stop(signal.SIGKILL)
    window.wait("document.querySelector('#status').innerText.startsWith('Connection lost')")
    assert undisturbed.startswith(answer_of(window))
    another(port)
    assert ended(window).startswith("Done")
    assert answer_of(window) == undisturbed
    assert re.match(r"after record \d+", window.text("#resumed"))
    window.console_errors()


async def test_it_continues_when_the_engine_is_killed(
    page: Browser, cluster: Cluster, bus: Bus
) -> None:
    engine = await cluster.pid(bus, "engine")
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    os.kill(engine, signal.SIGKILL)
    assert ended(page).startswith("Done")
    page.wait("document.querySelector('#stages').innerText.match(/attempt [2-9]/)")
    assert page.text("#tokens") == "900 tokens"
    assert page.text("#resumed") == "never"


@pytest.mark.parametrize(
    ("parameters", "told"),
    [
        ('{"tempreature": 1}', "tempreature"),
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"max_tokens"', "The parameters are not JSON"),
        ("[]", "The parameters must be one JSON object"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url":'
         ' "data:image/png;base64,iVBORw0KGgo="}}]}]}', "invalid_media"),
    ],
)  # fmt: skip
def test_errors_are_shown_as_text(page: Browser, parameters: str, told: str) -> None:
    ask(page, "What can you do?", parameters)
    page.wait("!document.querySelector('#error').hidden")
    assert told in page.text("#error")
    assert "[object" not in page.text("#error")
    ask(page, "", "{}")
    assert ended(page).startswith("Done")
    assert page.run("return document.querySelector('#error').hidden")


def test_an_empty_question_is_not_sent(page: Browser) -> None:
    page.click("#send")
    assert page.text("#error") == "Write a question first."
    assert page.run("return document.activeElement.id") == "question"


def test_a_key_is_accepted_and_stored_nowhere(window: Browser, another: Start) -> None:
    key = {"name": "one", "sha256": hashlib.sha256(b"pm-secret").hexdigest()}
    url = another(api_keys=[key]).url + "/"
    needs_key = "document.querySelector('#model').innerText === 'needs a key'"
    window.open(url)
    window.wait(needs_key)
    window.type("#key", "pm-secret" + TAB)
    window.wait("!document.querySelector('#send').disabled")
    window.type("#question", "Hello!" + ENTER)
    assert ended(window).startswith("Done")
    kept = "[document.cookie, {...localStorage}, {...sessionStorage}, location.href]"
    assert window.run(f"return JSON.stringify({kept})") == f'["",{{}},{{}},"{url}"]'
    window.open(url)
    window.wait(needs_key)
    assert window.run("return document.querySelector('#key').value") == ""
    window.console_errors()


def test_every_control_is_reached_by_keyboard(page: Browser) -> None:
    page.type("#file", str(IMAGES / "red.png"))
    page.run("document.querySelector('#settings').open = true; document.activeElement.blur()")
    reached = []
    for _ in range(16):
        page.press(TAB)
        reached.append(
            page.run("const e = document.activeElement; return e.ariaLabel || e.id || e.innerText")
        )
    order = ["Skip to the question", "OpenAPI", "file", "Remove red.png", "question", "model"]
    order += ["send", "Key and parameters", "key", "max-tokens", "temperature", "more", "answer"]
    assert [name for name in reached if name in order][: len(order)] == order


def test_every_control_has_a_name_for_a_screen_reader(page: Browser) -> None:
    page.type("#file", str(IMAGES / "red.png"))
    page.run("document.querySelector('#settings').open = true")
    names = page.labels("button, input, select, textarea, summary, a, [tabindex], ol, ul")
    assert len(names) > 12
    assert all(names.values()), names
    assert "Remove red.png" in names.values()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_it_fits_every_width_and_is_readable(page: Browser, width: int, scheme: str) -> None:
    page.emulate_screen(width, 800, scheme)
    page.type("#file", str(IMAGES / "red.png"))
    ask(page, "What can you do?", '{"tempreature": 1}')
    page.wait("!document.querySelector('#error').hidden")
    assert page.run("return document.documentElement.scrollWidth") <= width
    contrast, element = page.run(CONTRAST)
    assert contrast >= 4.5, element


def test_the_policy_blocks_foreign_and_inline_code(page: Browser, gateway: Gateway) -> None:
    loaded = page.run("return performance.getEntriesByType('resource').map((e) => e.name)")
    assert len(loaded) > 5
    assert all(url.startswith(f"{gateway.url}/") for url in loaded)
    page.run(
        """
        try { document.body.innerHTML += "<p>no</p>"; } catch { document.title = "refused"; }
        const image = new Image(); image.src = "http://127.0.0.2:9/"; document.body.append(image);
        """
    )
    assert page.run("return document.title") == "refused"
    told = "\n".join(page.console_errors())
    refused = r"'http://127\.0\.0\.2:9/' violates the .* Content Security Policy .*img-src"
    assert re.search(refused, told), told
