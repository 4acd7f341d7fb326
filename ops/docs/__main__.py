"""`make docs`: write the pages of docs/reference, and the tables of docs/guide/models.md."""

from ops.docs import http_api, messages, metrics, models, settings

for page in (http_api, messages, metrics, models, settings):
    for file, text in page.pages().items():
        file.write_text(text, encoding="utf-8")
