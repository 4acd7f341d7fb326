"""`make docs`: write the pages of docs/reference."""

from ops.docs import http_api, messages, metrics, settings

for page in (http_api, messages, metrics, settings):
    for file, text in page.pages().items():
        file.write_text(text, encoding="utf-8")
