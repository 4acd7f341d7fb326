"""The page of a response: a person sees its steps and decides on its calls."""

import secrets
from pathlib import Path
from typing import Any

import yaml

from ops.browser import Browser
from shared.bus.bus import Bus
from shared.protocol.items import ListedTool, MessageItem
from shared.protocol.records import Usage
from shared.protocol.requests import FunctionCall
from shared.protocol.steps import (
    GIVEN_TURN,
    Answered,
    Asked,
    Begun,
    Choice,
    Ended,
    Listed,
    PaintTool,
    Result,
    Sending,
    ServerUse,
    Step,
)
from shared.state.step_log import StepLog, open_log
from tests.cluster.conftest import Cluster
from tests.gateway.conftest import Gateway, start_gateway_at
from tests.gateway.routes.conftest import CONTRAST, needs_browser, visit
from tests.gateway.routes.test_chat import star_url

pytestmark = needs_browser
CALC = {"type": "mcp", "server_label": "calc"}
ECHO: dict[str, Any] = {"tools": [CALC], "tool_choice": "required"}
ITEMS = "[...document.querySelectorAll('.response:last-child li')]"


async def store_request(bus: Bus) -> StepLog:
    """A response that asks for the approval of two calls."""
    message, calls = (
        MessageItem("user", "Add.", "msg_1"),
        [
            FunctionCall("calc__add", '{"a": 1}'),
            FunctionCall("calc__add", '{"a": "<b>"}'),
        ],
    )
    steps: list[Step] = [
        Begun(
            0,
            int(bus.now_ms() / 1000),
            "demo",
            "",
            [message],
            ECHO,
            servers=[ServerUse("calc")],
            choice=Choice("required"),
            shows_tools=False,
        ),
        Listed(0, "calc", [ListedTool("add", {"type": "object"})]),
        Asked(0, 0),
        Answered(0, 0, "", calls, Usage(1, 1)),
        Ended(0, "completed", int(bus.now_ms() / 1000)),
    ]
    log = StepLog(bus, "", f"resp_{secrets.token_hex(8)}")
    for step in steps:
        await log.append(step)
    return log


async def test_a_person_decides_on_the_calls_of_a_response(
    window: Browser, cluster: Cluster, bus: Bus, tmp_path: Path
) -> None:
    tree = yaml.safe_load(cluster.config.read_text())
    servers = {"calc": {"url": "http://127.0.0.1:9/mcp"}}
    tree |= {"gateway": {"port": 0}, "agent": {"servers": servers}}
    gateway = start_gateway_at(cluster.url, tree, tmp_path)
    try:
        log = await store_request(bus)
        visit(window, gateway.url)
        window.open(f"{gateway.url}/page/response.html")
        window.type("#id", log.response_id)
        window.click("#show")
        window.wait(f"{ITEMS}.length === 3")
        text = window.text("#responses")
        assert "add" in text
        assert '{"a": "<b>"}' in text
        assert window.run(CONTRAST)[0] >= 4.5
        window.click("li:nth-child(2) .decide button:first-child")  # Nothing is sent yet.
        window.click("li:nth-child(3) .decide button:last-child")
        ended = "document.querySelector('.response:nth-child(2) .status')?.innerText"
        window.wait(f"['completed', 'incomplete'].includes({ended})", timeout_s=90)
        kinds = window.run(f"return {ITEMS}.map((row) => row.dataset.type)")
        assert kinds == ["mcp_call", "message"]
        # The agent has no such server, and says so.
        assert "no server 'calc'" in window.text(".response:nth-child(2) li")
        decided = (await open_log(bus, "", log.response_id)).state.decisions.values()
        assert [decision.approve for decision in decided] == [True, False]
        # A second person learns that the decision has been made.
        window.open(f"{gateway.url}/page/response.html#{log.response_id}")
        window.run("location.reload()")
        window.wait(f"{ITEMS}.length === 3")
        for row in (2, 3):
            window.click(f"li:nth-child({row}) .decide button")
        window.wait("document.querySelector('.response .error').innerText.includes('decided')")
        errors = [line for line in window.console_errors() if "Failed to load" not in line]
        assert errors == []
    finally:
        gateway.stop()


async def test_an_image_of_a_response_is_shown(window: Browser, gateway: Gateway, bus: Bus) -> None:
    now_s, png = int(bus.now_ms() / 1000), star_url().partition(",")[2]
    painter = PaintTool("demo", "image", "16x16", prompt="a star")
    steps: list[Step] = [
        Begun(0, now_s, "demo", "", [MessageItem("user", "a star", "msg_1")], {}, painter=painter),
        Sending(0, GIVEN_TURN, 0, 0, "k", "d", "b", may_repeat=True),
        Result(0, GIVEN_TURN, 0, "result", png),
        Ended(0, "completed", now_s),
    ]
    log = StepLog(bus, "", f"resp_{secrets.token_hex(8)}")
    for step in steps:
        await log.append(step)
    visit(window, gateway.url)
    window.open(f"{gateway.url}/page/response.html")
    window.type("#id", log.response_id)
    window.click("#show")
    window.wait("document.querySelector('.response img')?.naturalWidth > 1")
    text = window.text("#responses")
    assert "Image" in text
    assert "a star" in text
    assert window.console_errors() == []
