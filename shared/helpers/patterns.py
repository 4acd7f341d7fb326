"""Patterns of texts in messages and settings, with the words for them in errors. Pure."""

NAME = "^[A-Za-z0-9_-]{1,64}$"
TENANT_NAME = "^[A-Za-z0-9_-]{1,128}$"
SHA256 = "^[0-9a-f]{64}$"
HOST = "^[a-z0-9.:-]+$"
HTTP_URL = "^https?://"
NOT_BLANK = r"\S"
MEDIA_URL = "^media:[0-9a-f]{64}$"
FILE_ID = "^file-[0-9a-f]{64}$"
SIDES = "[1-9][0-9]{0,4}x[1-9][0-9]{0,4}"
SIZE = f"^{SIDES}$"
AUTO_OR_SIZE = f"^(auto|{SIDES})$"
_PAGES = "[1-9][0-9]{0,5}(-[1-9][0-9]{0,5})?"
PAGES = f"^{_PAGES}(,{_PAGES})*$"
SECONDS = r"^[0-9]{1,4}(\.[0-9]{1,3})?$"
LANGUAGE = "^[a-z]{2,3}$"

WORDS = {
    NAME: "1 to 64 letters, digits, hyphens and underscores",
    TENANT_NAME: "1 to 128 letters, digits, hyphens and underscores",
    SHA256: "64 lowercase hexadecimal digits",
    HOST: "a host name in lower case, or an address",
    HTTP_URL: "a URL that begins with http:// or https://",
    NOT_BLANK: "a text that is not blank",
    MEDIA_URL: "the media: URL of a stored file",
    FILE_ID: "the id of a stored file",
    SIZE: "a width and a height in pixels, such as 1024x768",
    AUTO_OR_SIZE: "auto, or a width and a height in pixels, such as 1024x768",
    PAGES: "numbers of pages, such as 1-3,7",
    SECONDS: "a number of seconds, such as 4 or 2.5",
    LANGUAGE: "the code of a language, such as en",
}
