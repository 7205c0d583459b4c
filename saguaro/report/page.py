"""Writes a report as one HTML file: styles and plots are inside, and nothing is loaded from anywhere."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path


@dataclass(frozen=True)
class Table:
    """A table: text, or numbers that are formatted already."""

    head: tuple[str, ...]
    rows: Sequence[Sequence[str]]
    caption: str = ""


@dataclass(frozen=True)
class Plot:
    """An SVG element and what it shows."""

    svg: str
    caption: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """What an experiment has to say."""

    paper: str  # what the paper found
    found: Sequence[str]  # what was found here, a paragraph each
    differs: Sequence[str] = ()  # where the two differ, and why
    parts: Sequence[Plot | Table] = ()


@dataclass(frozen=True, kw_only=True)
class Chapter:
    """A section with its place in the page."""

    name: str
    title: str
    section: Section | None  # None: nothing was measured
    missing: str = ""  # what was not measured
    command: str = ""


@dataclass(frozen=True, kw_only=True)
class Page:
    """A whole report."""

    title: str
    lead: str
    facts: Sequence[tuple[str, str]]
    chapters: Sequence[Chapter] = field(default_factory=list)


def html(page: Page) -> str:
    """The file's text: well-formed, in the syntax that HTML and XML share."""
    style = (Path(__file__).parent / "page.css").read_text(encoding="utf-8")
    links = "".join(f'<li><a href="#{one.name}">{escape(one.title)}</a></li>' for one in page.chapters)
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in page.facts)
    body = "\n".join(chapter(one) for one in page.chapters)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<meta name="color-scheme" content="light dark"/>
<title>{escape(page.title)}</title>
<style>
{style}</style>
</head>
<body>
<header>
<h1>{escape(page.title)}</h1>
<p>{escape(page.lead)}</p>
<dl>{facts}</dl>
<nav aria-label="Experiments"><ol>{links}</ol></nav>
</header>
<main>
{body}
</main>
</body>
</html>
"""


def chapter(one: Chapter) -> str:
    """An experiment."""
    inner = "" if one.section is None else _section(one.section)
    missing = f'<p class="missing">{escape(one.missing)}</p>' if one.missing else ""
    command = f'<p class="command">To redo this: <code>{escape(one.command)}</code></p>' if one.command else ""
    return f'<section id="{one.name}">\n<h2>{escape(one.title)}</h2>\n{missing}{inner}{command}\n</section>'


def _section(section: Section) -> str:
    told = [("The paper", [section.paper]), ("Here", section.found), ("Where they differ", section.differs)]
    texts = "".join(
        f'<div class="told"><h3>{name}</h3>{"".join(f"<p>{inline(text)}</p>" for text in lines)}</div>'
        for name, lines in told
        if lines
    )
    return texts + "".join(_plot(part) if isinstance(part, Plot) else table(part) for part in section.parts)


def inline(text: str) -> str:
    """A text with `code` in it.

    >>> inline("`a < b` & c")
    '<code>a &lt; b</code> &amp; c'
    """
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text))


def _plot(part: Plot) -> str:
    return f"\n<figure><div>{part.svg}</div><figcaption>{escape(part.caption)}</figcaption></figure>\n"


def table(one: Table) -> str:
    """A table, which scrolls by itself where the page is too narrow.

    >>> print(table(Table(("a", "b"), [("x", "1")])).replace("</tr>", "</tr>\\n"))
    <div class="table"><table><thead><tr><th class="text">a</th><th>b</th></tr>
    </thead><tbody><tr><td class="text">x</td><td>1</td></tr>
    </tbody></table></div>
    """
    caption = f'<p class="caption">{escape(one.caption)}</p>' if one.caption else ""
    kinds = ["" if all(map(_is_number, values)) else ' class="text"' for values in zip(*one.rows, strict=True)]
    head = _row("th", one.head, kinds or [""] * len(one.head))
    rows = "".join(_row("td", row, kinds) for row in one.rows)
    return f'{caption}<div class="table"><table><thead>{head}</thead><tbody>{rows}</tbody></table></div>'


def _row(tag: str, values: Sequence[str], kinds: Sequence[str]) -> str:
    cells = (f"<{tag}{kind}>{escape(value)}</{tag}>" for value, kind in zip(values, kinds, strict=True))
    return f"<tr>{''.join(cells)}</tr>"


def _is_number(text: str) -> bool:
    """Whether this is shown on the right: a number, a range of numbers, or none."""
    return re.fullmatch(r"(-|inf|[\d.,]+( to [\d.,]+)?)", text) is not None
