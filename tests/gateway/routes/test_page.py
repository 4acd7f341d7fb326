"""The web page in a real browser, against a whole Pagemill and its demo model."""

import base64
import hashlib
import os
import re
import signal
from pathlib import Path

import pytest
from PIL import Image

from ops.browser import ENTER, ESCAPE, TAB, Browser
from ops.demo import IMAGES
from shared.bus.bus import Bus
from tests.cluster.conftest import CONFIG, Cluster, start_cluster, stop_cluster, stopped
from tests.gateway.conftest import Gateway, Start, free_port, start_gateway
from tests.gateway.routes.conftest import (
    CONTRAST,
    ERRORS,
    LAST,
    LAST_ERROR,
    LONG,
    STAGES,
    TIMES,
    answer_of,
    ask,
    ended,
    needs_browser,
    visit,
    wait_for_text,
)

pytestmark = needs_browser

RECORDED = Path(__file__).parents[2] / "recorded"


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
    for fact in (".first", ".tokens", ".prompt", ".request"):
        assert re.search(r"\d", page.text(f"{LAST} {fact}")), fact
    assert page.text(f"{LAST} .resumed") == ""
    page.click(f"{LAST} .enlarge")
    page.wait("document.querySelector('dialog[open] img')?.naturalWidth > 0")
    page.press(ESCAPE)
    page.wait("document.querySelector('dialog') === null")


def test_an_example_is_asked_by_one_click(page: Browser) -> None:
    assert page.text("#model") == "demo (toy)"
    page.click("#examples button")
    page.wait(f"document.querySelector('{LAST}')")
    assert ended(page).startswith("Done in ")
    assert "yellow star" in answer_of(page)


def test_a_question_about_a_clip_plays_what_is_sent(page: Browser, tmp_path: Path) -> None:
    frames = [Image.new("RGB", (112, 84), (40 * i, 0, 0)) for i in range(4)]
    frames[0].save(
        tmp_path / "clip.gif", save_all=True, append_images=frames[1:], duration=250, loop=0
    )
    page.type("#file", f"{tmp_path / 'clip.gif'}\n{RECORDED / 'clip.mp4'}")
    page.wait("document.querySelectorAll('#images li').length === 2")
    assert page.run("return document.querySelector('#images img').src").startswith("data:image/gif")
    assert page.run("return document.querySelector('#images video').src").startswith(
        "data:video/mp4"
    )
    page.click("#images li:last-child button")
    ask(page, "What color is it?")
    assert ended(page).startswith("Done in ")
    assert page.run("return document.querySelector('.turn .thumbs img').alt") == "clip.gif"
    assert page.console_errors() == []


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
            "Coordinator",
            "Renderer",
            "Encoder",
            "Engine",
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
        document.querySelector(".drop-label").dispatchEvent(
          new DragEvent("drop", { dataTransfer: files, bubbles: true, cancelable: true }));
        """,
        base64.b64encode((IMAGES / "red.png").read_bytes()).decode(),
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
    while page.run("return document.querySelector('.turn:last-child .text').ariaBusy") == "true":
        lengths.append(len(answer_of(page)))
    assert len(set(lengths)) > 3
    assert lengths == sorted(lengths)
    assert ended(page).startswith("Done")
    assert page.text(f"{LAST} .tokens") == "900 tokens"
    assert float(page.text(f"{LAST} .rate")) > 0


@pytest.mark.parametrize("way", ["button", "escape"])
async def test_cancel(page: Browser, cluster: Cluster, bus: Bus, way: str) -> None:
    engine = await cluster.pid(bus, "engine")
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    with stopped(engine):
        if way == "button":
            page.click("#cancel")
        else:
            page.press(ESCAPE)
    assert ended(page) == "Cancelled"
    script = "return fetch('v1/requests/' + arguments[0]).then((answer) => answer.json())"
    assert page.run(script, page.text(f"{LAST} .request"))["state"] == "cancelled"
    assert page.run("return document.querySelector('.turn .error').hidden")


# Holds the answer to the POST back, and has the server not know the request at the first DELETE.
EARLY_CANCEL = """
const send = window.fetch;
let deletes = 0;
window.fetch = async (url, options) => {
  if (options?.method === "DELETE" && ++deletes === 1) return new Response("{}", { status: 404 });
  if (options?.method !== "POST") return send(url, options);
  window.posted = options.headers["X-Request-Id"];
  const { signal, ...rest } = options;
  send(url, rest);
  return new Promise((_, reject) => {
    signal.addEventListener("abort", () => reject(signal.reason));
  });
};
"""


async def test_a_request_that_is_cancelled_before_it_is_known_does_not_run_on(
    page: Browser, cluster: Cluster, bus: Bus
) -> None:
    engine = await cluster.pid(bus, "engine")
    page.run(EARLY_CANCEL)
    # On a busy machine the engine would finish before the page's second attempt.
    with stopped(engine):
        ask(page, "What can you do?", LONG)
        page.wait("!document.querySelector('#cancel').hidden")
        # The id is there before the server has answered.
        assert page.text(f"{LAST} .request") == page.run("return window.posted")
        page.click("#cancel")
        assert ended(page) == "Cancelled"
    page.run(
        """
        const look = async () => {
          const answer = await fetch("v1/requests/" + window.posted);
          window.state = answer.ok ? (await answer.json()).state : null;
          if (!["finished", "failed", "cancelled"].includes(window.state)) setTimeout(look, 100);
        };
        look();
        """
    )
    page.wait("['finished', 'failed', 'cancelled'].includes(window.state)", timeout_s=60)
    assert page.run("return window.state") == "cancelled"


def test_it_resumes_when_the_gateway_is_killed(window: Browser, another: Start) -> None:
    port = free_port()
    gateway = another(port)
    visit(window, gateway.url)
    ask(window, "What can you do?", LONG)
    assert ended(window).startswith("Done")
    undisturbed = answer_of(window)
    window.click("#new")
    ask(window, "What can you do?", LONG)
    wait_for_text(window)
    gateway.stop(signal.SIGKILL)
    window.wait(
        "document.querySelector('.turn:last-child .status').innerText.startsWith('Connection lost')"
    )
    assert undisturbed.startswith(answer_of(window))
    another(port)
    assert ended(window).startswith("Done")
    assert answer_of(window) == undisturbed
    assert re.match(r"after record \d+", window.text(f"{LAST} .resumed"))
    window.console_errors()


async def test_it_continues_when_the_engine_is_killed(
    page: Browser, cluster: Cluster, bus: Bus
) -> None:
    # On a busy machine the answer may have ended before the signal.
    for _ in range(5):
        engine = await cluster.pid(bus, "engine")
        ask(page, "What can you do?", LONG)
        wait_for_text(page)
        os.kill(engine, signal.SIGKILL)
        assert ended(page).startswith("Done")
        if re.search("attempt [2-9]", page.text(f"{LAST} .stages")):
            break
    else:
        pytest.fail("no answer had a second attempt")
    assert page.text(f"{LAST} .tokens") == "900 tokens"
    assert page.text(f"{LAST} .resumed") == ""


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ('{"tempreature": 1}', "tempreature"),
        ('{"max_tokens": 0}', "max_tokens"),
        ('{"max_tokens"', "The parameters are not JSON"),
        ("[]", "The parameters must be one JSON object"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url":'
         ' "data:image/png;base64,iVBORw0KGgo="}}]}]}', "invalid_media"),
    ],
)  # fmt: skip
def test_errors_are_shown_as_text(page: Browser, parameters: str, message: str) -> None:
    ask(page, "What can you do?", parameters)
    errors = page.wait(f"{ERRORS}.join('\\n')")
    assert message in errors
    assert "[object" not in errors
    page.run("document.querySelector('#more').value = '{}'")
    retry = f"document.querySelector('{LAST} .retry') ?? document.querySelector('#send')"
    page.run(f"({retry}).click()")
    page.wait(f"document.querySelector('{LAST} .status')")
    assert ended(page).startswith("Done")
    assert page.run(f"return {LAST_ERROR}.hidden && document.querySelector('#notice').hidden")


def test_an_empty_question_is_not_sent(page: Browser) -> None:
    page.click("#send")
    assert page.text("#notice") == "Write a question first."
    assert page.run("return document.activeElement.id") == "question"


def test_a_key_is_accepted_and_stored_nowhere(window: Browser, another: Start) -> None:
    key = {"name": "one", "sha256": hashlib.sha256(b"pm-secret").hexdigest()}
    url = another(api_keys=[key]).url + "/"
    needs_key = "document.querySelector('#model').innerText === 'API key required'"
    window.open(url)
    window.wait(needs_key)
    window.type("#key", "pm-secret" + TAB)
    window.wait("!document.querySelector('#send').disabled")
    window.type("#question", "Hello!" + ENTER)
    assert ended(window).startswith("Done")
    stored = window.run("return [document.cookie, {...localStorage}, {...sessionStorage}]")
    assert "Hello!" in str(stored)
    assert "pm-secret" not in str(stored)
    window.open(url)
    window.wait(needs_key)
    assert window.run("return document.querySelector('#key').value") == ""
    window.console_errors()


def test_every_control_is_reached_by_keyboard(page: Browser) -> None:
    page.type("#file", str(IMAGES / "red.png"))
    page.wait("document.querySelectorAll('#images li').length === 1")
    ask(page, "Hello!")
    assert ended(page).startswith("Done")
    page.type("#file", str(IMAGES / "red.png"))
    page.wait("document.querySelectorAll('#images li').length === 1")
    # The browser begins where the last focus was.
    page.run("const e = document.querySelector('.skip'); e.focus(); e.blur()")
    reached = []
    for _ in range(24):
        page.press(TAB)
        reached.append(
            page.run("const e = document.activeElement; return e.ariaLabel || e.id || e.innerText")
        )
    order = ["new", "Hello!", "Rename Hello!", "Delete Hello!", "Batches", "Responses", "OpenAPI"]
    order += ["model", "open-settings", "Questions and answers", "Edit question 1"]
    order += ["Copy the answer", "Retry question 1", "Timeline", "Copy id", "Remove red.png"]
    order += ["question", "file", "send"]
    names = ["Timeline" if "Coordinator" in name else name for name in reached]
    assert [name for name in names if name in order][: len(order)] == order, reached


def test_every_control_has_a_name_for_a_screen_reader(page: Browser) -> None:
    page.type("#file", str(IMAGES / "red.png"))
    page.wait("document.querySelectorAll('#images li').length === 1")
    ask(page, "What color is this image?")
    assert ended(page).startswith("Done")
    page.type("#file", str(IMAGES / "red.png"))
    page.wait("document.querySelectorAll('#images li').length === 1")
    page.run("document.querySelector('#settings').showPopover()")
    selector = "button, input, select, textarea, summary, a, [tabindex], ol, ul, form, article"
    names = page.labels(f":is({selector}, section):not(#menu, [hidden], [hidden] *)")
    assert len(names) > 12
    assert all(names.values()), names
    assert "Remove red.png" in names.values()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 390, 768, 1200])
def test_it_fits_every_width_and_is_readable(page: Browser, width: int, scheme: str) -> None:
    page.emulate_screen(width, 800, scheme)
    page.type("#file", str(IMAGES / "red.png"))
    ask(page, "What can you do?", '{"tempreature": 1}')
    page.wait(f"{ERRORS}.length")
    page.run("document.querySelector('.turn details').open = true")
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
    errors = "\n".join(page.console_errors())
    refused = r"'http://127\.0\.0\.2:9/' violates the .* Content Security Policy .*img-src"
    assert re.search(refused, errors), errors
