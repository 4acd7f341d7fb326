"""Plain words for llguidance's errors, for authors of grammars, expressions and schemas. Pure.

The sandbox imports this module, so it needs little besides the standard library.
"""

import re

MAX_REASON_LEN = 300
TOO_COMPLEX = "it is too complex"
UNREADABLE = "this cannot be read"

_TYPES = {
    "array": "a list",
    "f64": "a number",
    "positive integer": "a whole number of at least 0",
    "string": "a text",
    "object": "an object",
    "object or boolean": "an object, true or false",
    "string or array of strings": "a text or a list of texts",
    "boolean": "true or false",
    "bool": "true or false",
}

# The first pattern that a text contains decides. Its groups fill the gaps.
_SENTENCES = [
    (re.compile(pattern, re.DOTALL), sentence)
    for pattern, sentence in (
        (r"regex parse error:\n    ([^\n]+)\n[^\n]*\nerror: ([^\n]+)", "{1} in the expression {0}"),
        (r"regex parse error.*error: ([^\n]+)", "{0} in an expression"),
        (
            r"lookarounds not supported.* in regex /(.*?)/\n",
            "an anchor or a word boundary is not supported inside of the expression {0}",
        ),
        (r"Invalid type: ([^\n]*)", "{0} is not a type of JSON schemas"),
        (r"Unimplemented keys: \[([^\n]*)\]", "the keyword {0} of JSON schemas is not supported"),
        (r"Expected ([\w ]+) for '(\S+)' item", "an item of {1} must be {0}"),
        (r"Expected ([\w ]+) for '(\S+)'", "{1} must be {0}"),
        (r"(\S+) must be an? ([^\n,]+)", "{0} must be {1}"),
        (r"Unknown format: ([^\n]*)", "the format {0} is not supported"),
        (r"Unsatisfiable schema: ([^\n]*)", "no value matches the schema: {0}"),
        (r"Pointer '([^\n]*)' does not exist", "$ref names #{0}, which the schema does not have"),
        (
            r"Resource '(?:json-schema:///)?([^\n]*)' is not present",
            "{0} is another document, which is not read",
        ),
        (r"oneOf constraints", "oneOf is supported only if one of its parts matches: write anyOf"),
        (r"regexes /(.*?)/ and /(.*?)/ are not disjoint", "{0} and {1} match the same names"),
        (r"invalid multiple of", "multipleOf must be more than 0"),
        (r"unknown field `([^`]*)`", "x-guidance has no option {0}"),
        (r"%llguidance declaration", "%llguidance needs an object with options"),
        (r"expected struct JsonCompileOptions", "x-guidance must be an object"),
        (r'failed to parse "%json"', "%json needs a JSON schema"),
        (r"NoExtensionBias", "no finite text matches it"),
        (r"no start rule found", "it has no rule with the name start"),
        (r"Empty grammar", "it is empty"),
        (r"panic|too (?:many|big|large)|max is|limit|fuel", TOO_COMPLEX),
    )
]
_SYNTAX = [
    (re.compile(pattern), sentence)
    for pattern, sentence in (
        (r"Expected token (.+), found .*", "{0} is missing"),
        (r"expecting (.+) \(at .*", "{0} is missing"),
        (r"unknown special token: (\S+);.*", "there is no special token {0}"),
        (r"Unknown common regex: (.+?);.*", "there is no {0}"),
    )
]
_PLACE = re.compile(r"(?:at )?(\d+)\((\d+)\): ([^\n]*)")
# Text for the authors of the library: paths, types, names of variables and of classes.
_INTERNAL = re.compile(r"::|`|\w_\w|[a-z][A-Z]|\bstruct\b|\w\(|lexer|parse")


def reason_of(text: str) -> str:
    """Return the reason in an error of a matcher; empty for an empty text."""
    if not text:
        return ""
    for pattern, sentence in _SENTENCES:
        if match := pattern.search(text):
            return _filled(sentence, match)
    place = _PLACE.match(text)
    if place is None:
        return _plain(text.partition("\n")[0])
    line, column, complaint = place.groups()
    for pattern, sentence in _SYNTAX:
        if match := pattern.fullmatch(complaint):
            complaint = _filled(sentence, match)
    return f"line {line}, column {column}: {_plain(complaint)}"


def _filled(sentence: str, match: re.Match[str]) -> str:
    groups = (_words_of(group or "") for group in match.groups())
    return sentence.format(*groups)[:MAX_REASON_LEN]


def _words_of(text: str) -> str:
    return _TYPES.get(text, text.replace('"', ""))


def _plain(complaint: str) -> str:
    return UNREADABLE if _INTERNAL.search(complaint) else complaint[:MAX_REASON_LEN]
