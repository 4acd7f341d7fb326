"""The page of batches in a browser: files of requests, images with a prompt, progress, errors."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from ops.browser import TAB, Browser, browsing
from ops.demo import IMAGES
from shared.protocol.requests import GenerateRequest, ImagePart
from shared.protocol.sampling import SamplingParams
from tests.gateway.batches.conftest import BatchRig, chat_line, jsonl
from tests.gateway.conftest import Process, start_gateway_at
from tests.gateway.http.test_auth import ALICE, KEYS
from tests.gateway.routes.conftest import CONTRAST, needs_browser

pytestmark = needs_browser

FIRST = "document.querySelector('.batch:first-child')"
STATUS = f"{FIRST}?.querySelector('.status').innerText"
FILES = "document.querySelectorAll('#files li').length"
BUTTONS = f"[...{FIRST}.querySelectorAll('button:not([hidden])')].map((b) => b.innerText)"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("chromium")) as running:
        yield running


@pytest.fixture
def page(browser: Browser, rig: BatchRig, batcher: Process) -> Iterator[Browser]:
    browser.emulate_screen(1200, 900, "light")
    browser.open(f"{rig.gateway.url}/page/batches.html")
    browser.wait("!document.querySelector('#send').disabled")
    browser.console_errors()
    yield browser
    errors = [line for line in browser.console_errors() if "Failed to load resource" not in line]
    assert errors == []


def drop(page: Browser, *files: Path) -> None:
    page.type("#file", "\n".join(map(str, files)))
    page.wait(f"{FILES} === {len(files)}")


def run_file(page: Browser, folder: Path, content: bytes, name: str = "lines.jsonl") -> None:
    """Begin a batch, and wait until the page shows it."""
    shown = page.run("return document.querySelectorAll('.batch').length")
    (folder / name).write_bytes(content)
    drop(page, folder / name)
    page.click("#send")
    page.wait(f"document.querySelectorAll('.batch').length === {shown + 1}")
    assert page.run(f"return {FILES}") == 0


def errors_of(page: Browser) -> list[str]:
    texts: list[str] = page.run(
        f"return [...{FIRST}.querySelectorAll('.errors li')].map((item) => item.innerText)"
    )
    return texts


def saved(page: Browser, folder: Path, button: str) -> list[dict[str, object]]:
    """Click a button of the newest batch, and return the lines of the file that is saved."""
    page.cdp("Browser.setDownloadBehavior", behavior="allow", downloadPath=str(folder))
    named = "find((button) => button.innerText === arguments[0])"
    page.run(f"[...{FIRST}.querySelectorAll('button')].{named}.click()", button)
    name = page.run(f"return {FIRST}.querySelector('code').innerText")
    kind = {"Answers": "output", "Errors": "errors"}[button]
    file = folder / f"{name}-{kind}.jsonl"
    while not file.exists():
        page.run("return new Promise((done) => setTimeout(done, 50))")
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_file_of_requests_runs_and_its_answers_are_saved(
    page: Browser, rig: BatchRig, tmp_path: Path
) -> None:
    with rig.model.held_after(4):
        run_file(page, tmp_path, jsonl([chat_line(n) for n in range(10)]))
        page.wait(f"{FIRST}.querySelector('progress').value === 4")
        assert page.run(f"return {STATUS}") == "in progress"
        assert page.run(f"return {BUTTONS}") == ["Cancel"]
        text = page.text(".batch:first-child .facts")
        assert "4 answered, 0 failed, 10 in all" in text
        assert "24h, until" in text
    page.wait(f"{STATUS} === 'completed'")
    assert page.run(f"return {FIRST}.querySelector('progress').value") == 10
    assert page.run(f"return {BUTTONS}") == ["Answers"]
    for fact in (".rate", ".tokens"):
        assert float(page.text(f".batch:first-child {fact}").replace(",", "")) > 0
    lines = saved(page, tmp_path, "Answers")
    assert {line["custom_id"] for line in lines} == {f"line-{n}" for n in range(10)}


def test_a_prompt_is_asked_for_each_image(page: Browser, rig: BatchRig) -> None:
    drop(page, IMAGES / "red.png", IMAGES / "blue.png")
    page.click("#send")
    assert page.text("#notice") == "Write a prompt for the images."
    page.type("#question", "What color is it?")
    page.run("document.querySelector('#more').value = arguments[0]", '{"max_tokens": 7}')
    known = set(rig.model.requests)
    page.click("#send")
    page.wait(f"{STATUS} === 'completed' && {FILES} === 0")
    asked = [request for name, request in rig.model.requests.items() if name not in known]
    assert len(asked) == 2
    assert len({image_of(request) for request in asked}) == 2
    assert {max_tokens_of(request) for request in asked} == {7}


def max_tokens_of(request: GenerateRequest) -> int | None:
    assert isinstance(request.sampling_params, SamplingParams)
    return request.sampling_params.max_tokens


def image_of(request: GenerateRequest) -> str:
    assert request.messages
    (message,) = request.messages
    assert isinstance(message.content, list)
    image, text = message.content
    assert isinstance(image, ImagePart)
    assert "What color is it?" in str(text)
    return image.image_url.url


def test_a_cancelled_batch_shows_its_errors_by_kind(
    page: Browser, rig: BatchRig, tmp_path: Path
) -> None:
    with rig.model.held_after(5):
        run_file(page, tmp_path, jsonl([chat_line(n) for n in range(20)]))
        page.wait(f"{FIRST}.querySelector('progress').value === 5")
        page.click(".batch:first-child .acts button")
        page.wait(f"{STATUS} === 'cancelled'")
    assert errors_of(page) == ["batch_cancelled: 15"]
    assert page.run(f"return {BUTTONS}") == ["Answers", "Errors"]
    assert len(saved(page, tmp_path, "Errors")) == 15


def test_errors_of_a_file_have_their_line_numbers(page: Browser, tmp_path: Path) -> None:
    run_file(page, tmp_path, jsonl([chat_line(0), chat_line(0), chat_line(2, stream=True)]))
    page.wait(f"{STATUS} === 'failed'")
    first, second = errors_of(page)
    assert first.startswith("line 2: ")
    assert second.startswith("line 3: ")
    assert page.run(f"return {BUTTONS}") == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.jsonl", b"PK\x03\x04", "The first line of a.jsonl is not a request with a url."),
        ("b.txt", b'{"custom_id": "a"}', "The first line of b.txt is not a request with a url."),
        ("c.jsonl", b'{"url": "/v1/files"}', "endpoint must be one of"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(
    page: Browser, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    drop(page, tmp_path / name)
    page.click("#send")
    page.wait("!document.querySelector('#notice').hidden")
    assert message in page.text("#notice")
    page.click("#files button")


def test_other_files_are_refused_when_they_are_added(page: Browser, tmp_path: Path) -> None:
    (tmp_path / "a.zip").write_bytes(b"PK\x03\x04")
    page.type("#file", str(tmp_path / "a.zip"))
    page.wait("document.querySelector('#notice').innerText.includes('a.zip is not a PNG')")


def test_older_batches_are_shown_on_demand(page: Browser, tmp_path: Path) -> None:
    for number in range(21):
        run_file(page, tmp_path, jsonl([chat_line(number)]))
    page.run("location.reload()")
    page.wait("document.querySelectorAll('.batch').length === 20")
    page.wait("!document.querySelector('#older').hidden")
    page.click("#older")
    page.wait("document.querySelectorAll('.batch').length > 20")
    ids = page.run("return [...document.querySelectorAll('.batch code')].map((c) => c.innerText)")
    assert len(set(ids)) == len(ids)


def test_a_key_is_asked_for(browser: Browser, rig: BatchRig, tmp_path: Path) -> None:
    tree = rig.tree | {"gateway": {"port": 0, "api_keys": KEYS}}
    gateway = start_gateway_at(rig.broker.url, yaml.safe_load(json.dumps(tree)), tmp_path)
    try:
        browser.open(f"{gateway.url}/page/batches.html")
        browser.wait("document.querySelector('#health').innerText === 'API key required'")
        browser.type("#key", ALICE + TAB)
        browser.wait("!document.querySelector('#send').disabled")
        run_file(browser, tmp_path, jsonl([chat_line(0)]))
        browser.wait(f"{STATUS} === 'completed'")
        assert len(saved(browser, tmp_path, "Answers")) == 1
        assert browser.run("return [document.cookie, {...localStorage}]") == ["", {}]
    finally:
        gateway.stop()
        browser.console_errors()


def test_every_control_has_a_name_for_a_screen_reader(page: Browser, tmp_path: Path) -> None:
    run_file(page, tmp_path, jsonl([chat_line(0), chat_line(1, temperature=-1)]))
    page.wait(f"{STATUS} === 'completed'")
    drop(page, IMAGES / "red.png")
    page.run("document.querySelector('#settings').showPopover()")
    selector = (
        "button, input, select, textarea, summary, a, progress, [tabindex], ul, form, article"
    )
    names = page.labels(f":is({selector}):not(#menu, [hidden], [hidden] *)")
    assert all(names.values()), names
    assert "Remove red.png" in names.values()
    assert "Finished lines" in names.values()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 768])
def test_it_fits_every_width_and_is_readable(
    page: Browser, tmp_path: Path, width: int, scheme: str
) -> None:
    page.emulate_screen(width, 800, scheme)
    run_file(page, tmp_path, jsonl([chat_line(0), chat_line(1, temperature=-1)]))
    page.wait(f"{STATUS} === 'completed'")
    assert page.run("return document.documentElement.scrollWidth") <= width
    contrast, element = page.run(CONTRAST)
    assert contrast >= 4.5, element
