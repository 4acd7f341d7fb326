"""Headless Chromium through its own driver: the W3C WebDriver protocol is JSON over HTTP."""

import base64
import contextlib
import http.client
import json
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shared.bus.embedded_server import free_port

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
# The key of an element in WebDriver's JSON.
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
ENTER, ESCAPE, TAB = "\ue007", "\ue00c", "\ue004"

# Parts that would only take processor time.
WITHOUT = (
    "--disable-gpu", "--disable-software-rasterizer", "--no-first-run",
    "--disable-extensions", "--disable-sync", "--disable-default-apps", "--disable-breakpad",
    "--disable-component-update", "--disable-background-networking", "--mute-audio",
    "--disable-features=Translate,OptimizationHints,MediaRouter,AutofillServerCommunication",
)  # fmt: skip

# Calls a function in the page until its result is true, for a second at most.
POLL = """
const [began, ...args] = [performance.now(), ...arguments];
const value = function () { return %s; };
return new Promise((done) => {
  const look = () => {
    const found = value.apply(null, args);
    if (found || performance.now() - began > 1000) done(found); else setTimeout(look, 20);
  };
  look();
});
"""

# Why the browser cannot be used here, or None if it can.
MISSING = None if CHROMIUM and DRIVER else "needs Debian's packages chromium and chromium-driver"


class Browser:
    """A browser window. Methods find elements by CSS selectors."""

    def __init__(self, port: int) -> None:
        self._port = port
        # Chromium's sandbox refuses root; only this project's own pages are opened.
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        arguments = ["--headless=new", "--disable-dev-shm-usage", *WITHOUT, *sandbox]
        capabilities = {
            "browserName": "chrome",
            "goog:chromeOptions": {"binary": CHROMIUM, "args": arguments},
            "goog:loggingPrefs": {"browser": "ALL"},
        }
        session = self._call("POST", "/session", {"capabilities": {"alwaysMatch": capabilities}})
        self._session = f"/session/{session['sessionId']}"

    def quit(self) -> None:
        self._call("DELETE", self._session)

    def open(self, url: str) -> None:
        self._call("POST", f"{self._session}/url", {"url": url})

    def run(self, script: str, *args: Any) -> Any:
        """Run a script. Return its result; if that is a promise, return the value of the
        promise."""
        body = {"script": script, "args": list(args)}
        return self._call("POST", f"{self._session}/execute/sync", body)

    def text(self, selector: str) -> str:
        return str(self.run("return document.querySelector(arguments[0]).innerText", selector))

    def type(self, selector: str, text: str) -> None:
        self._call("POST", f"{self._find(selector)}/value", {"text": text})

    def press(self, *keys: str) -> None:
        """Press keys in the element that has the focus."""
        acts = [{"type": act, "value": key} for key in keys for act in ("keyDown", "keyUp")]
        actions = [{"type": "key", "id": "keyboard", "actions": acts}]
        self._call("POST", f"{self._session}/actions", {"actions": actions})

    def click(self, selector: str) -> None:
        self._call("POST", f"{self._find(selector)}/click", {})

    def wait(self, condition: str, *args: Any, timeout_s: float = 30.0) -> Any:
        """Wait until a JavaScript expression is true; return its value."""
        deadline = time.monotonic() + timeout_s
        while not (value := self.run(POLL % condition, *args)):
            assert time.monotonic() < deadline, (
                condition,
                self.run("return document.body.innerText"),
            )
        return value

    def cdp(self, command: str, **params: Any) -> Any:
        """Run a command of the DevTools protocol."""
        body = {"cmd": command, "params": params}
        return self._call("POST", f"{self._session}/goog/cdp/execute", body)

    def emulate_screen(self, width: int, height: int, scheme: str, scale: float = 1) -> None:
        """Emulate a screen of this size, with the colour scheme `light` or `dark`."""
        self.cdp(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=width < 600,
        )
        self.cdp("Emulation.setScrollbarsHidden", hidden=True)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.cdp("Emulation.setEmulatedMedia", features=features)

    def screenshot(self) -> bytes:
        """Return a PNG of the window."""
        return base64.b64decode(self._call("GET", f"{self._session}/screenshot"))

    def console_errors(self) -> list[str]:
        """Return errors of scripts and of the content security policy since the last call."""
        return self.console("SEVERE")

    def console(self, *levels: str) -> list[str]:
        """Return the console's messages of these levels since the last call."""
        entries = self._call("POST", f"{self._session}/se/log", {"type": "browser"})
        return [entry["message"] for entry in entries if entry["level"] in levels]

    def labels(self, selector: str) -> dict[str, str]:
        """Return the accessible name of each matching element, by its HTML."""
        body = {"using": "css selector", "value": selector}
        elements = self._call("POST", f"{self._session}/elements", body)
        names = {}
        for element in elements:
            path = f"{self._session}/element/{element[ELEMENT]}"
            html = self._call("GET", f"{path}/property/outerHTML")
            names[html] = self._call("GET", f"{path}/computedlabel")
        return names

    def _find(self, selector: str) -> str:
        body = {"using": "css selector", "value": selector}
        element = self._call("POST", f"{self._session}/element", body)
        return f"{self._session}/element/{element[ELEMENT]}"

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=60)
        with contextlib.closing(connection):
            connection.request(method, path, None if body is None else json.dumps(body))
            answer = connection.getresponse()
            value = json.loads(answer.read())["value"]
        if answer.status != 200:
            raise RuntimeError(f"{value['error']}: {value['message']}")
        return value


@contextlib.contextmanager
def browsing(folder: Path) -> Iterator[Browser]:
    """Run a browser, with the driver's log in `folder`."""
    assert DRIVER is not None
    port = free_port()
    # Chromium puts a socket into its profile, whose path may have 107 bytes.
    profile = tempfile.TemporaryDirectory(prefix="chromium-", ignore_cleanup_errors=True)
    with (folder / "chromedriver.log").open("wb") as log:
        env = os.environ | {"HOME": profile.name, "TMPDIR": profile.name}
        driver = subprocess.Popen([DRIVER, f"--port={port}"], stdout=log, stderr=log, env=env)
    try:
        _wait_for(port)
        browser = Browser(port)
        try:
            yield browser
        finally:
            browser.quit()
    finally:
        driver.terminate()
        driver.wait(10)
        profile.cleanup()


def _wait_for(port: int) -> None:
    deadline = time.monotonic() + 30
    while True:
        with contextlib.suppress(OSError):
            socket.create_connection(("127.0.0.1", port), 1).close()
            return
        assert time.monotonic() < deadline, "chromedriver does not start"
        time.sleep(0.05)
