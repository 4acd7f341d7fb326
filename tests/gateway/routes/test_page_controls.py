"""The controls of the web page: images, keyboard, contrast, and text that never becomes markup."""

import asyncio
import base64
from pathlib import Path

import pytest
import yaml

from ops.browser import ENTER, TAB, Browser
from ops.demo import IMAGES
from shared.bus.bus import Bus
from shared.protocol import subjects
from shared.protocol.encoding import to_json
from shared.protocol.multimodal import Modality
from shared.protocol.renderer_rpc import ModelCard
from tests.cluster.conftest import Cluster
from tests.gateway.conftest import Gateway, start_gateway_at
from tests.gateway.routes.conftest import (
    CONTRAST,
    LAST,
    ask,
    ended,
    needs_browser,
    violations,
    visit,
)
from tests.npm import needs_npm

pytestmark = needs_browser

SHIFT = "\ue008"
DRAG = """
const [type, selector, name, kind, content, related] = arguments;
const data = new DataTransfer();
const bytes = Uint8Array.from(atob(content), (char) => char.charCodeAt(0));
if (name) data.items.add(new File([bytes], name, { type: kind }));
else data.setData("text/plain", "words");
const event = new DragEvent(type, {
  dataTransfer: data, bubbles: true, cancelable: true,
  relatedTarget: related && document.querySelector(related),
});
document.querySelector(selector).dispatchEvent(event);
const style = getComputedStyle(document.querySelector("#drop"));
return [style.borderTopStyle, style.backgroundColor, style.boxShadow];
"""
NUM_IMAGES = "document.querySelectorAll('#images li').length"
# Contrast of the hints inside of empty fields, which `CONTRAST` does not see.
PLACEHOLDERS = CONTRAST.replace(
    "const texts = ",
    'const shade = (e) => getComputedStyle(e, "::placeholder");\n'
    'return [...document.querySelectorAll("[placeholder]")].filter(shown).map((element) => {\n'
    "  const [a, b] = [light(numbers(shade(element).color)), light(behind(element))];\n"
    "  return shade(element).opacity * (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);\n"
    "});\nconst texts = ",
)
# Writes a text whole and in single characters; returns the markup that both become.
WRITE = """
return import("/page/markdown.js").then(({ Markdown }) => arguments[0].map((text) => {
  const shown = [[text], [...text]].map((pieces) => {
    const box = document.createElement("div");
    const writer = new Markdown(box);
    pieces.forEach((piece) => writer.write(piece));
    box.querySelectorAll(".code-head").forEach((head) => head.remove());
    for (const element of box.querySelectorAll("*")) {
      const others = element.getAttributeNames().filter((name) => !/href|start/.test(name));
      others.forEach((name) => element.removeAttribute(name));
    }
    return box.innerHTML;
  });
  if (shown[0] !== shown[1]) throw new Error(JSON.stringify(shown));
  return shown[0];
}));
"""
# Texts, and the elements that they become.
MARKDOWN = [
    ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    (
        "Look:\n```html\n<script>no()</script>\n\n  end\n```\nafter",
        "<p>Look:</p><div><pre><code>&lt;script&gt;no()&lt;/script&gt;\n\n  end</code></pre></div>"
        "<p>after</p>",
    ),
    ("```\nstill open", "<div><pre><code>still open</code></pre></div>"),
    ("```not`a fence", "<p>```not`a fence</p>"),
    (
        "# One\n**two** and *three*, `f(*x)`, 2 * 3 * 4, a_b_c\n\n---",
        "<h2>One</h2><p><strong>two</strong> and <em>three</em>, <code>f(*x)</code>,"
        " 2 * 3 * 4, a_b_c</p><hr>",
    ),
    (
        "2. a\n   - b\n\n   c\n3. d\n\n> e",
        '<ol start="2"><li>a<ul><li>b</li></ul><p>c</p></li><li>d</li></ol>'
        "<blockquote><p>e</p></blockquote>",
    ),
    (
        "| a | b |\n|---|---|\n| 1 | *2* |",
        "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>1</td><td><em>2</em></td></tr></tbody></table></div>",
    ),
    (
        "[x](javascript:no()) [y](https://e.org/a_b) ![z](http://e.org/z.png) https://e.org.",
        '<p>x (javascript:no()) <a href="https://e.org/a_b">y</a>'
        ' <a href="http://e.org/z.png">z</a> <a href="https://e.org">https://e.org</a>.</p>',
    ),
    ("", ""),
]

# Lets the page read the next file only when `window.release()` is called.
SLOW_READ = """
const decode = window.createImageBitmap;
const released = new Promise((resolve) => (window.release = resolve));
window.createImageBitmap = async (file) => {
  window.createImageBitmap = decode;
  await released;
  return decode(file);
};
"""
NAMES = "[...document.querySelectorAll('#images img + span')].map((e) => e.firstChild.data)"


# Returns the controls of a row that lie below or over the one before, or outside of the window.
MISPLACED = """
const boxes = [...document.querySelectorAll(arguments[0])]
  .filter((element) => element.checkVisibility({ visibilityProperty: true }))
  .map((element) => [element.id || element.className, element.getBoundingClientRect()]);
return boxes.filter(([, { x, right, y, bottom }], at) => {
  const before = boxes[at - 1]?.[1] ?? { right: 0, y, bottom };
  const shift = Math.abs(y + bottom - before.y - before.bottom) / 2;
  return x < before.right || right > innerWidth || shift > 1;
}).map(([name]) => name);
"""


CONTROLS = ".controls :is(button, select, .drop-label, .speech, .hint)"


def drag(page: Browser, item: str, to: str, file: str = "", content: bytes = b"") -> list[str]:
    """Dispatch one event of a drag; return the look of the drop area."""
    data = base64.b64encode(content).decode()
    look: list[str] = page.run(DRAG, item, to, file, "image/png", data, None)
    return look


def test_the_drop_area_is_highlighted_while_files_are_dragged(page: Browser) -> None:
    calm = drag(page, "dragover", "main")
    highlit = drag(page, "dragover", "main", "red.png")
    assert highlit != calm
    assert "none" not in highlit
    # From one element to another inside of the page.
    assert page.run(DRAG, "dragleave", "main", "red.png", "", "", "form") == highlit
    assert drag(page, "dragleave", "main", "red.png") == calm
    drag(page, "dragover", "#form", "red.png")
    assert drag(page, "drop", "main", "red.png", (IMAGES / "red.png").read_bytes()) == calm
    page.wait(f"{NUM_IMAGES} === 1")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("notes.png", b"no image at all", "notes.png is not a PNG, JPEG or WebP image, a GIF,"),
        ("page.png", b"<svg xmlns='http://www.w3.org/2000/svg'/>", "page.png is not a PNG"),
        ("moving.png", b"GIF89a" + bytes(60), "moving.png is damaged"),
        ("cut.png", (IMAGES / "red.png").read_bytes()[:60], "cut.png is damaged"),
        ("empty.png", b"", "empty.png is not a PNG"),
    ],
)
def test_a_file_that_is_no_image_is_refused_at_once(
    page: Browser, name: str, content: bytes, message: str
) -> None:
    drag(page, "drop", "#question", name, content)
    page.wait("!document.querySelector('#notice').hidden")
    assert page.text("#notice").startswith(message)
    assert page.run(f"return {NUM_IMAGES}") == 0
    # The bytes decide, not the name.
    drag(page, "drop", "#question", "odd.txt", (IMAGES / "red.png").read_bytes())
    page.wait(f"{NUM_IMAGES} === 1")
    assert page.run("return document.querySelector('#notice').hidden")


def test_images_stay_in_the_order_in_which_they_were_chosen(page: Browser) -> None:
    content = (IMAGES / "red.png").read_bytes()
    drag(page, "drop", "main", "zero.png", content)
    page.wait(f"{NUM_IMAGES} === 1")
    page.run(SLOW_READ)
    drag(page, "drop", "main", "first.png", content)
    drag(page, "drop", "main", "second.png", content)
    page.click("#images button")
    page.run("window.release()")
    page.wait(f"{NUM_IMAGES} === 2")
    assert page.run(f"return {NAMES}") == ["first.png", "second.png"]


def test_a_question_waits_for_its_images(page: Browser) -> None:
    page.run(SLOW_READ)
    drag(page, "drop", "main", "slow.png", (IMAGES / "red.png").read_bytes())
    ask(page, "What color is this image?")
    page.press(ENTER)
    page.run("window.release()")
    page.wait("document.querySelectorAll('.turn .thumbs img').length === 1")
    assert ended(page).startswith("Done")
    assert page.run("return document.querySelectorAll('.turn').length") == 1
    assert page.run(f"return {NUM_IMAGES}") == 0


def test_images_over_a_limit_are_refused_with_the_limit(
    window: Browser, cluster: Cluster, tmp_path: Path
) -> None:
    tree = yaml.safe_load(cluster.config.read_text())
    tree["gateway"] = {"port": 0}
    tree["renderer"] = {"max_image_bytes": 4000, "max_image_pixels": 100}
    gateway = start_gateway_at(cluster.url, tree, tmp_path)
    try:
        visit(window, gateway.url)
        big, small = IMAGES / "five_hearts.png", IMAGES / "red.png"
        window.type("#file", f"{big}\n{small}")
        window.wait("document.querySelectorAll('#notice p').length === 2")
        first, second = window.text("#notice").split("\n\n")
        assert first == "five_hearts.png has 7,941 bytes, over the limit of 4,000 bytes."
        assert second.startswith("red.png has ")
        assert "over the limit of 100 pixels" in second
        assert window.run(f"return {NUM_IMAGES}") == 0
        assert window.console_errors() == []
    finally:
        gateway.stop()


def test_shift_and_enter_start_a_line_and_enter_sends(page: Browser) -> None:
    page.type("#question", f"one{SHIFT}{ENTER}{SHIFT}two")
    assert page.run("return document.querySelector('#question').value") == "one\ntwo"
    assert page.run("return document.querySelectorAll('.turn').length") == 0
    page.type("#question", ENTER)
    assert ended(page)
    assert page.text(f"{LAST} .question") == "one\ntwo"
    assert page.run("return document.querySelector('#question').value") == ""


def test_the_focus_is_visible(page: Browser) -> None:
    look = """
    const focused = document.activeElement;
    const places = { question: "#drop", file: ".drop-label" };
    const style = getComputedStyle(document.querySelector(places[focused.id] ?? ":focus"));
    return [style.outlineStyle, style.boxShadow];
    """
    page.run("const e = document.querySelector('.skip'); e.focus(); e.blur()")
    names = ["new", "Batches", "Responses", "OpenAPI", "model", "open-settings", "log"]
    names += ["Describe the image.", "How many shapes are there?", "What can you do?"]
    names += ["question", "file", "send"]
    for name in names:
        page.press(TAB)
        focused = "const e = document.activeElement; return e.id || e.innerText"
        assert page.run(focused).split("\n")[0] == name
        assert set(page.run(look)) != {"none"}, name


@pytest.mark.parametrize("width", [390, 1280, 1920])
def test_each_toolbar_is_one_row(page: Browser, width: int) -> None:
    page.emulate_screen(width, 800, "light")
    shown = "document.querySelectorAll('#record, #speech, #cancel')"
    page.run(f"{shown}.forEach((control) => {{ control.hidden = false; }})")
    assert page.run(MISPLACED, ".bar > :not(label)") == []
    assert page.run(MISPLACED, CONTROLS) == []


def test_the_request_id_is_copied(page: Browser) -> None:
    allowed = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    page.cdp("Browser.grantPermissions", permissions=allowed)
    ask(page, "What can you do?")
    assert ended(page).startswith("Done")
    page.click(f"{LAST} .copy")
    page.wait(f"document.querySelector('{LAST} .copy').innerText === 'Copied'")
    copied = page.run("return navigator.clipboard.readText()")
    assert copied == page.text(f"{LAST} .request")


def test_each_stage_shows_its_worker(page: Browser) -> None:
    ask(page, "What can you do?")
    assert ended(page).startswith("Done")
    page.wait(f"document.querySelector('{LAST} .stages li:last-child').dataset.state === 'done'")
    selector = f"[...document.querySelectorAll('{LAST} .stages li:not([hidden]) .worker')]"
    workers = page.run(f"return {selector}.map((e) => e.innerText)")
    assert [name.partition("-")[0] for name in workers] == ["coordinator", "renderer", "engine"]


def test_markdown_becomes_elements_and_markup_stays_text(page: Browser) -> None:
    shown = page.run(WRITE, [text for text, _ in MARKDOWN])
    assert shown == [html for _, html in MARKDOWN]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
def test_a_conversation_is_readable(page: Browser, width: int, height: int, scheme: str) -> None:
    page.emulate_screen(width, height, scheme)
    page.type("#file", str(IMAGES / "red.png"))
    page.wait(f"{NUM_IMAGES} === 1")
    ask(page, "What color is this image?")
    assert ended(page).startswith("Done")
    page.run("document.querySelector('.turn details').open = true")
    drag(page, "drop", "#question", "notes.png", b"no image")
    page.wait("!document.querySelector('#notice').hidden")
    for _ in range(2):
        contrast, element = page.run(CONTRAST)
        assert contrast >= 4.5, element
        assert min(page.run(PLACEHOLDERS)) >= 4.5
        drag(page, "dragover", "main", "red.png")
    background = page.run("return getComputedStyle(document.body).backgroundColor")
    channels = [int(text) for text in background[4:-1].split(",")]
    assert (max(channels) < 64) == (scheme == "dark")
    assert page.run("return document.documentElement.scrollWidth") <= width


@needs_npm
@pytest.mark.parametrize(("width", "scheme"), [(1280, "light"), (390, "dark")])
def test_axe_finds_no_violation(
    page: Browser, gateway: Gateway, axe: str, width: int, scheme: str
) -> None:
    page.emulate_screen(width, 800, scheme)
    assert violations(page, axe) == []
    page.click("#examples button")
    page.wait("document.querySelector('.turn') !== null")
    assert ended(page).startswith("Done")
    drag(page, "drop", "#question", "notes.png", b"no image")
    page.wait("!document.querySelector('#notice').hidden")
    assert violations(page, axe) == []
    page.click("#open-settings")
    assert violations(page, axe) == []
    for name in ("batches", "response"):
        page.open(f"{gateway.url}/page/{name}.html")
        page.wait("document.querySelector('#side a') !== null")
        assert violations(page, axe) == []


async def test_the_files_follow_the_media_that_the_chosen_model_reads(
    window: Browser, cluster: Cluster, bus: Bus, tmp_path: Path
) -> None:
    tree = yaml.safe_load(cluster.config.read_text())
    tree["gateway"] = {"port": 0}
    kinds: dict[str, list[Modality]] = {"sees": ["image"], "reads": [], "hears": ["audio"]}
    for name, media in kinds.items():
        tree["models"][name] = {"path": "nowhere"}
        card = to_json(ModelCard(name, 1024, 768, "image" in media, False, media=media))
        await bus.add_responder(
            subjects.renderer("card", name),
            lambda _, card=card: card,  # type: ignore[misc]
        )
    gateway = await asyncio.to_thread(start_gateway_at, cluster.url, tree, tmp_path)
    try:
        await asyncio.to_thread(visit, window, gateway.url)
        hints = {name: await asyncio.to_thread(choose, window, name) for name in ("demo", *kinds)}
    finally:
        await asyncio.to_thread(gateway.stop)
    assert hints == {
        "demo": "Files of these kinds: image, video, document.",
        "sees": "Files of these kinds: image, document.",
        "reads": "",
        "hears": "Files of these kinds: audio.",
    }


def choose(window: Browser, model: str) -> str:
    """Choose a model; return the hint about its files, or an empty text without the control."""
    window.run(
        "const list = document.querySelector('#model'); list.value = arguments[0];"
        "list.dispatchEvent(new Event('change'));",
        model,
    )
    shown = "document.querySelector('#attach').hidden ? '' : document.querySelector('#file-hint')"
    return str(window.run(f"return ({shown}).textContent ?? ''"))
