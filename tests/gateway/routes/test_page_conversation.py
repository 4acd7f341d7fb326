"""The conversation on the web page: its turns, its storage, its place on the screen."""

import asyncio
import hashlib

import pytest

from ops.browser import ENTER, TAB, Browser
from ops.demo import IMAGES
from shared.bus.bus import Bus
from tests.cluster.conftest import Cluster, stopped
from tests.gateway.conftest import Gateway, Start
from tests.gateway.routes.conftest import (
    ERRORS,
    LAST,
    LONG,
    answer_of,
    ask,
    ended,
    needs_browser,
    visit,
    wait_for_text,
)

pytestmark = needs_browser

QUESTIONS = "[...document.querySelectorAll('.turn .question')].map((p) => p.innerText)"
ANSWERS = "[...document.querySelectorAll('.turn .text')].map((box) => box.innerText)"
READY = "!document.querySelector('#send').disabled"
LAST_STAGE_DONE = f"document.querySelector('{LAST} .stages li:last-child').dataset.state === 'done'"
STORED_TURN = (
    "JSON.parse(localStorage[Object.keys(localStorage).find((name) => name.endsWith('/0'))])"
)
# Records the bodies that the page posts, and that the server has answered a cancellation.
RECORD = """
window.posted = [];
const send = window.fetch;
window.fetch = (url, options) => {
  if (options?.method === "POST") window.posted.push(JSON.parse(options.body));
  const answer = send(url, options);
  if (options?.method === "DELETE") answer.then(() => { window.deleted = true; });
  return answer;
};
"""
# Measures after each change of the text, when the page itself has reacted to it.
MEASURE = """
window.measured = [];
new ResizeObserver(() => {
  const log = document.querySelector("#log").getBoundingClientRect();
  const box = document.querySelector(arguments[0]);
  const walker = document.createTreeWalker(box, NodeFilter.SHOW_TEXT);
  let last = null;
  while (walker.nextNode()) last = walker.currentNode;
  if (last === null) return;
  const range = new Range();
  range.selectNodeContents(last);
  const text = [...range.getClientRects()].at(-1);
  window.measured.push({
    text: text.bottom, top: log.top, bottom: log.bottom, height: text.bottom - log.top,
    composer: document.querySelector("#form").getBoundingClientRect().bottom,
    wide: document.documentElement.scrollWidth, tall: document.documentElement.scrollHeight,
  });
}).observe(document.querySelector("#turns"));
"""


def choose(page: Browser, file: str) -> None:
    page.type("#file", str(IMAGES / file))
    page.wait("document.querySelectorAll('#images li').length === 1")


def reload(page: Browser) -> None:
    page.run("window.isOld = true; location.reload()")
    page.wait("!window.isOld && document.querySelector('.turn')")


def press(page: Browser, selector: str, text: str) -> None:
    """Click the first button with this text."""
    buttons = f"[...document.querySelectorAll('{selector} button')]"
    page.run(f"{buttons}.find((button) => button.innerText === arguments[0]).click()", text)


def roles(body: dict[str, list[dict[str, str]]]) -> list[str]:
    return [message["role"] for message in body["messages"]]


def test_turns_stay_and_are_sent_with_the_next_question(page: Browser) -> None:
    page.run(RECORD)
    choose(page, "red.png")
    ask(page, "What color is this image?")
    assert ended(page).startswith("Done")
    ask(page, "What can you do?")
    assert ended(page).startswith("Done")
    assert page.run(f"return {QUESTIONS}") == ["What color is this image?", "What can you do?"]
    answers = page.run(f"return {ANSWERS}")
    assert len(answers) == 2
    assert all(answers)
    assert page.run("return document.querySelector('.turn img').naturalWidth") > 0
    first, second = page.run("return window.posted")
    assert roles(first) == ["user"]
    assert roles(second) == ["user", "assistant", "user"]
    assert second["messages"][0] == first["messages"][0]
    assert second["messages"][1]["content"] == answers[0]


def test_a_question_that_failed_is_not_sent_again_with_the_next(page: Browser) -> None:
    page.run(RECORD)
    ask(page, "What can you do?", '{"tempreature": 1}')
    page.wait(f"{ERRORS}.length")
    page.wait("document.querySelector('#settings:popover-open .fault')")
    assert "tempreature" in page.text("#more + .fault")
    assert "no answer" in page.text(".turn .notes")
    ask(page, "Hello!")
    assert ended(page).startswith("Done")
    assert roles(page.run("return window.posted.at(-1)")) == ["user"]


def test_a_question_is_asked_again_or_changed(page: Browser) -> None:
    page.run(RECORD)
    choose(page, "red.png")
    for question in ("What color is this image?", "What can you do?"):
        ask(page, question)
        assert ended(page).startswith("Done")
    press(page, LAST, "Retry")
    assert ended(page).startswith("Done")
    assert roles(page.run("return window.posted.at(-1)")) == ["user", "assistant", "user"]
    press(page, ".turn", "Edit")
    assert "question 1 and all turns after it" in page.text("#editing")
    page.run("document.querySelector('#question').value = ''")
    ask(page, "Describe the image.")
    assert ended(page).startswith("Done")
    assert page.run(f"return {QUESTIONS}") == ["Describe the image."]
    (message,) = page.run("return window.posted.at(-1).messages")
    assert [part["type"] for part in message["content"]] == ["image_url", "text"]
    assert page.run("return document.querySelector('#editing').hidden")
    assert page.run("return document.querySelectorAll('.turn .thumbs img').length") == 1


def test_conversations_stay_in_a_list(page: Browser) -> None:
    page.run(RECORD)
    page.run("document.querySelector('#system').value = 'Be terse.'")
    page.run("document.querySelector('#system').dispatchEvent(new Event('change'))")
    ask(page, "What can you do?")
    assert ended(page).startswith("Done")
    assert roles(page.run("return window.posted.at(-1)")) == ["system", "user"]
    page.click("#new")
    assert page.run(f"return {QUESTIONS}") == []
    page.wait("document.querySelector('#system').value === ''")
    ask(page, "Hello!")
    assert ended(page).startswith("Done")
    assert roles(page.run("return window.posted.at(-1)")) == ["user"]
    titles = "[...document.querySelectorAll('.conversations a')].map((a) => a.innerText)"
    assert page.run(f"return {titles}") == ["Hello!", "What can you do?"]
    page.click(".conversations li:last-child a")
    page.wait(f"{QUESTIONS}.join() === 'What can you do?'")
    assert page.run("return document.querySelector('#system').value") == "Be terse."
    press(page, ".conversations li:last-child", "Rename")
    page.run("document.activeElement.value = '<b>Abilities</b>'")
    page.press(ENTER)
    assert page.run(f"return {titles}") == ["Hello!", "<b>Abilities</b>"]
    reload(page)
    press(page, ".conversations li:last-child", "Delete")
    assert len(page.run(f"return {titles}")) == 2
    press(page, ".conversations li:last-child", "Really?")
    page.wait(f"{QUESTIONS}.length === 0")
    assert page.run(f"return {titles}") == ["Hello!"]
    assert len(page.run("return Object.keys(localStorage)")) == 2


async def test_an_answer_continues_in_another_conversation_until_it_is_deleted(
    page: Browser, cluster: Cluster, bus: Bus
) -> None:
    engine = await cluster.pid(bus, "engine")
    page.run(RECORD)
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    with stopped(engine):
        page.click("#new")
        page.wait(f"{QUESTIONS}.length === 0")
        page.wait(READY)
        page.click(".conversations a")
        page.wait(f"document.querySelector('{LAST} .resumed')?.textContent")
    assert ended(page).startswith("Done")
    assert page.text(f"{LAST} .tokens") == "900 tokens"
    page.click("#new")
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    name = page.text(f"{LAST} .request")
    with stopped(engine):
        press(page, ".conversations", "Delete")
        press(page, ".conversations", "Really?")
        page.wait("window.deleted")
    assert len(page.run("return Object.keys(localStorage)")) == 2
    state = (
        "fetch('v1/requests/' + arguments[0]).then((got) => got.json()).then((got) => got.state)"
    )
    assert page.run(f"return {state}", name) == "cancelled"


def test_a_reload_keeps_the_conversation(page: Browser) -> None:
    choose(page, "red.png")
    ask(page, "What color is this image?")
    status = ended(page)
    page.wait(LAST_STAGE_DONE)
    page.run("document.querySelector('.timeline').open = false")
    parts = "document.querySelectorAll('.turn .answer')"
    texts = f"[...{parts}].map((part) => part.innerText)"
    before = page.run(f"return {texts}")
    page.wait(f"{STORED_TURN}.request?.state === 'finished'")
    reload(page)
    assert page.text(f"{LAST} .status") == status
    assert page.run(f"return {texts}") == before
    page.wait("document.querySelector('.turn img').naturalWidth > 0")
    page.run(RECORD)
    page.wait(READY)
    ask(page, "What can you do?")
    assert ended(page).startswith("Done")
    (body,) = page.run("return window.posted")
    assert roles(body) == ["user", "assistant", "user"]
    assert body["messages"][0]["content"][0]["type"] == "image_url"


def test_a_reload_continues_an_unfinished_answer(page: Browser) -> None:
    ask(page, "What can you do?", LONG)
    assert ended(page).startswith("Done")
    undisturbed = answer_of(page)
    page.click("#new")
    ask(page, "What can you do?", LONG)
    wait_for_text(page)
    reload(page)
    page.wait(f"document.querySelector('{LAST} .resumed').textContent.startsWith('after record')")
    assert ended(page).startswith("Done")
    assert answer_of(page) == undisturbed
    assert page.text(f"{LAST} .tokens") == "900 tokens"


def test_a_reload_asks_for_the_key_and_then_continues(window: Browser, another: Start) -> None:
    key = {"name": "one", "sha256": hashlib.sha256(b"pm-secret").hexdigest()}
    gateway = another(api_keys=[key])
    window.open(f"{gateway.url}/")
    needs_key = "document.querySelector('#model').innerText === 'API key required'"
    window.wait(needs_key)
    window.type("#key", "pm-secret" + TAB)
    window.wait(READY)
    ask(window, "What can you do?", LONG)
    wait_for_text(window)
    reload(window)
    window.wait(f"document.querySelector('{LAST} .status').innerText.includes('API key')")
    window.wait(needs_key)
    window.type("#key", "pm-secret" + TAB)
    window.wait(f"document.querySelector('{LAST} .status').innerText.startsWith('Done')")
    ended(window)
    assert window.text(f"{LAST} .tokens") == "900 tokens"
    window.console_errors()


def test_images_that_a_reload_will_forget_are_announced(page: Browser) -> None:
    page.run(
        """
        let size = 2 ** 23;
        for (let text = ""; size >= 1; size /= 2) {
          try { localStorage.setItem("other", text + "x".repeat(size)); } catch { continue; }
          text = localStorage.getItem("other");
        }
        localStorage.setItem("other", localStorage.getItem("other").slice(8000));
        """
    )
    choose(page, "yellow_star.jpg")
    ask(page, "Describe the image.")
    assert ended(page).startswith("Done")
    assert "too large to be kept across a reload" in page.text(f"{LAST} .notes")
    reload(page)
    assert "no longer stored" in page.text(f"{LAST} .notes")
    assert page.text(f"{LAST} .thumbs") == "yellow_star.jpg"


@pytest.mark.parametrize(("width", "height"), [(1280, 720), (390, 844)])
async def test_the_newest_text_is_in_view(
    page: Browser, cluster: Cluster, bus: Bus, width: int, height: int
) -> None:
    engine = await cluster.pid(bus, "engine")
    page.emulate_screen(width, height, "light")
    with stopped(engine):
        ask(page, "What can you do?", LONG)
        page.wait(f"document.querySelector('{LAST} .text')")
        page.run(MEASURE, f"{LAST} .text")
    # A slow browser sees how the text grows only if the engine waits for it.
    while page.run("return window.measured.length") < 6:
        await asyncio.sleep(0.02)
        with stopped(engine):
            await asyncio.sleep(0.1)
    assert ended(page).startswith("Done")
    measured = page.run("return window.measured")
    assert len(measured) > 5
    for box in measured:
        assert box["top"] < box["text"] <= box["bottom"] <= height, box
        assert box["composer"] <= height, box
        assert box["wide"] <= width, box
        assert box["tall"] <= height, box
    hidden = "const log = document.querySelector('#log'); return log.scrollWidth - log.clientWidth"
    assert page.run(hidden) == 0
    assert page.run("return document.querySelector('#log').scrollTop") > 0


async def test_a_reader_who_scrolls_up_stays_there(
    page: Browser, cluster: Cluster, bus: Bus
) -> None:
    engine = await cluster.pid(bus, "engine")
    # So low that it scrolls when hundreds of tokens are still to come.
    page.emulate_screen(390, 480, "light")
    log = "document.querySelector('#log')"
    ask(page, "What can you do?", LONG)
    page.wait(f"{log}.scrollTop > 100")
    with stopped(engine):
        assert page.run("return document.querySelector('#to-end').hidden")
        page.run(f"{log}.scrollTop = 10")
        page.wait("!document.querySelector('#to-end').hidden")
        height = page.run(f"return {log}.scrollHeight")
    page.wait(f"{log}.scrollHeight > arguments[0]", height)
    assert page.run(f"return {log}.scrollTop") == 10
    page.click("#to-end")
    page.wait(f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 2")
    assert ended(page).startswith("Done")
    page.wait(f"{log}.scrollHeight - {log}.scrollTop - {log}.clientHeight < 2")
    assert page.run("return document.querySelector('#to-end').hidden")


def test_the_console_stays_empty(window: Browser, gateway: Gateway) -> None:
    visit(window, gateway.url)
    for question in ("What color is this image?", "What can you do?"):
        choose(window, "red.png")
        ask(window, question)
        assert ended(window).startswith("Done")
        window.wait(LAST_STAGE_DONE)
    reload(window)
    window.wait(READY)
    assert window.console("SEVERE", "WARNING") == []
