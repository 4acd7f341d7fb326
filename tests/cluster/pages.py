"""Steps on the web page that tests of several models share."""

from ops.browser import Browser


def choose(page: Browser, model: str) -> None:
    """Choose a model, and show its parameters."""
    page.run(
        """
        document.querySelector("#settings").togglePopover(true);
        const select = document.querySelector("#model");
        select.value = arguments[0];
        select.dispatchEvent(new Event("change"));
        """,
        model,
    )
