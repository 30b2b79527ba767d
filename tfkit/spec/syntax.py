"""The YAML parser's errors in plain words.

PyYAML uses terms such as block mapping and flow scalar, and its C and Python parsers word the same error differently.
Here, each of their errors becomes a `Diagnostic` at the location that needs the correction.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import yaml

from tfkit.errors import Diagnostic, Source, Span, quoted

TAGS = "tags are not allowed in a spec: a spec is data"
TAGS_HELP = 'remove the tag; text that starts with `!` needs quotes: "!text"'
DIRECTIVES = "a spec has no lines that start with `%`"
GLUED_MESSAGE = "no space after the colon"
INDENT = "indent all keys of a mapping by the same number of spaces"
LIST = "write `key: [a, b]`, or put each `- item` on a separate line below its key"

_GLUED_KEY = re.compile(r"[ \t-]*([A-Za-z_][\w.-]*):(?!//)(\S[^\r\n]*)")


def missing_space(text: str) -> str | None:
    """Return the help for `key:value`, which YAML reads as one word; None for any other text."""
    match = _GLUED_KEY.match(text)
    return f"write a space after the colon: {quoted(f'{match[1]}: {match[2]}')}" if match else None


def explain_error(problem: yaml.YAMLError, source: Source, start: int = 0) -> Diagnostic:
    """Return the diagnostic for the parser's error in `source.text[start:]`."""
    mark = getattr(problem, "problem_mark", None)
    if mark is None:
        return Diagnostic("this is not valid YAML", source.span(start))
    context = getattr(problem, "context_mark", None) or mark
    location = _ErrorLocation(source, start + mark.index, start + context.index)
    text = f"{getattr(problem, 'context', '')}: {getattr(problem, 'problem', '')}"
    if re.match(r" *\t", location.line):
        tab = location.at - len(location.before) + location.line.index("\t")
        return Diagnostic("a tab cannot indent a line", source.span(tab), help="indent with spaces")
    for pattern, rule in _RULES:
        if re.search(pattern, text):
            return rule(location)
    for pattern, at_opener, message, help in _PLAIN_RULES:
        if re.search(pattern, text):
            at = location.opened if at_opener else location.at
            char = source.text[at : at + 1]
            return Diagnostic(message.format(char), source.span(at), help=help.format(char))
    return Diagnostic("this is not valid YAML", location.word())


@dataclass(frozen=True)
class _ErrorLocation:
    """The offset at which the parser stopped (`at`), and the start of the construct it was parsing (`opened`)."""

    source: Source
    at: int
    opened: int

    @property
    def line(self) -> str:
        return self.source.line(self.source.span(self.at).line)

    @property
    def before(self) -> str:
        return self.line[: self.source.span(self.at).column - 1]

    @property
    def char(self) -> str:
        return self.source.text[self.at : self.at + 1]

    @property
    def opener(self) -> str:
        return self.source.text[self.opened : self.opened + 1]

    @property
    def ended(self) -> bool:
        return not self.source.text[self.at :].strip()

    def word(self, at: int | None = None) -> Span:
        start = self.at if at is None else at
        match = re.compile(r"[\w.-]+").match(self.source.text, start)
        return self.source.span(start, match.end() if match else None)


def _second_colon(location: _ErrorLocation) -> Diagnostic:
    source, at = location.source, location.source.span(location.at)
    above = next((n for n in range(at.line - 1, 0, -1) if source.line(n).strip()), 0)
    if missing_space(source.line(above)):
        return _glued_colon(source, above)
    if re.search(r":\s", location.before):
        help = 'quote a value that contains a colon: `key: "one: two"`'
        return Diagnostic("a second colon in one line", at, help=help)
    notes = ("the value above continues here",) if above else ()
    return Diagnostic("this line cannot hold a key", at, notes=notes, help=INDENT)


def _no_colon(location: _ErrorLocation) -> Diagnostic:
    number = location.source.span(location.opened).line
    if missing_space(location.source.line(number)):
        return _glued_colon(location.source, number)
    return Diagnostic("a key without a value", location.word(location.opened), help="write `key: value`")


def _glued_colon(source: Source, number: int) -> Diagnostic:
    line = source.line(number)
    return Diagnostic(GLUED_MESSAGE, Span(source, number, line.index(":") + 1), help=missing_space(line))


def _unclosed_bracket(location: _ErrorLocation) -> Diagnostic:
    closer = "]" if location.opener == "[" else "}"
    opened, at = location.source.span(location.opened), location.source.span(location.at)
    if opened.line == at.line and not location.ended:
        help = "put a comma between items; quote text that contains brackets, commas or colons"
        return Diagnostic(f"expected `,` or `{closer}` here", location.word(), help=help)
    comma = "" if location.ended else f", or a comma before line {at.line}, column {at.column}"
    return Diagnostic(f"`{location.opener}` is never closed", opened, help=f"add the missing `{closer}`{comma}")


def _no_value(location: _ErrorLocation) -> Diagnostic:
    if not location.ended:
        help = "remove the extra comma"
        return Diagnostic(f"expected a value before `{location.char}`", location.word(), help=help)
    last = len(location.source.text.rstrip()) - 1
    help = "close the open bracket with `]` or `}`"
    return Diagnostic("the text ends inside brackets", location.source.span(max(0, last)), help=help)


def _unknown_escape(location: _ErrorLocation) -> Diagnostic:
    at = location.source.text.rfind("\\", location.opened, location.at + 1)
    help = "write `\\\\` for a backslash, or use single quotes"
    return Diagnostic("an unknown escape in quoted text", location.source.span(at), help=help)


def _unexpected_text(location: _ErrorLocation) -> Diagnostic:
    if location.char in ("]", "}"):
        return Diagnostic(f"`{location.char}` closes nothing", location.word(), help="remove it")
    if location.before.strip():
        help = "quote the entire value if it is a single text"
        return Diagnostic("unexpected text after a value", location.word(), help=help)
    if location.char == "-":
        return Diagnostic("a list item cannot start here", location.word(), help=LIST)
    if location.opener == "-":
        return Diagnostic("a key cannot start among list items", location.word(), help=LIST)
    return Diagnostic("the indentation of this line matches nothing above it", location.word(), help=INDENT)


# The first pattern that matches in "context: problem" applies.
_RULES: tuple[tuple[str, Callable[[_ErrorLocation], Diagnostic]], ...] = (
    (r"mapping values are not allowed", _second_colon),
    (r"could not find expected ':'", _no_colon),
    (r"expected ',' or", _unclosed_bracket),
    (r"node content", _no_value),
    (r"quoted scalar: (?!found unexpected)", _unknown_escape),
    (r"block (mapping|collection)|document start", _unexpected_text),
)

# Pattern; True to point to the start of the construct; message; help. {} is the character at the location.
_PLAIN_RULES = (
    (r"quoted scalar: found unexpected", True, "this quote is never closed", "add the closing {}"),
    (r"cannot start any token", False, "text cannot start with {!r}", "quote it"),
    (
        r"an (anchor|alias)",
        True,
        "`{}` needs a name right after it",
        'quote text that starts with it: "{}text"',
    ),
    (r"\btag\b", True, TAGS, TAGS_HELP),
    (r"directive|incompatible", True, DIRECTIVES, "remove the line"),
    (r"block scalar", False, "unexpected text after `|` or `>`", "start the text on a separate line below"),
    (r"sequence entries are not allowed", False, "a list item cannot start here", LIST),
)
