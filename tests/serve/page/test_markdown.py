"""Markdown on the page: what it makes, that it is made piece by piece, and that nothing in it can do harm."""

import random
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.serve.http.driver import Running
from tests.serve.page.driver import Pages, answer_with, as_tokens, ask, chunk, finished, origins, round_of, say

pytestmark = pytest.mark.browser

# The text in one piece, and by `step` characters at a time: what both give, and how many elements each made.
BOTH_WAYS = """async ([text, step]) => {
  const { Markdown } = await import("/markdown.js");
  const paint = (from, to) => document.createTextNode(text.slice(from, to));
  const make = document.createElement;
  const run = (work) => {
    const root = make.call(document, "div");
    let n = 0;
    document.createElement = (tag) => (n++, make.call(document, tag));
    work(new Markdown(root, paint));
    document.createElement = make;
    root.normalize();
    return { html: root.innerHTML, n, text: root.textContent };
  };
  const whole = run((view) => view.update(text));
  const pieces = run((view) => {
    for (let n = step; n < text.length + step; n += step) view.update(text.slice(0, n));
  });
  return [whole, pieces];
}"""


def both_ways(page: Page, text: str, step: int = 1) -> tuple[dict[str, Any], dict[str, Any]]:
    whole, pieces = page.evaluate(BOTH_WAYS, [text, step])
    return whole, pieces


def html(page: Page, text: str) -> str:
    """What a text becomes; the same when it comes character by character."""
    whole, pieces = both_ways(page, text)
    assert whole["html"] == pieces["html"]
    made: str = whole["html"]
    return made


LINK = 'target="_blank" rel="noopener noreferrer"'
CASES = [
    ("one\ntwo\n\nthree", "<p>one\ntwo</p><p>three</p>"),
    ("# A *b* #\n###### F", "<h3>A <em>b</em></h3><h6>F</h6>"),
    ("**b** *i* ***x*** __b__ _i_ ~~d~~", None),
    ("**b** `*c*` \\*d\\*", "<p><strong>b</strong> <code>*c*</code> *d*</p>"),
    ("snake_case_name 2 * 3 * 4 **open", "<p>snake_case_name 2 * 3 * 4 **open</p>"),
    ("*a **b* c**", None),
    ("- a\n- b\n  - c\n\n  d\n- e", None),
    ("3. a\n4. b", '<ol start="3"><li><p>a</p></li><li><p>b</p></li></ol>'),
    ("> a\nb\n>\n> - c", "<blockquote><p>a\nb</p><ul><li><p>c</p></li></ul></blockquote>"),
    ("a\n***\nb", "<p>a</p><hr><p>b</p>"),
    ("a\n- b\n* c", "<p>a</p><ul><li><p>b</p></li></ul><ul><li><p>c</p></li></ul>"),
    ("In\n1984. It", "<p>In\n1984. It</p>"),
    ("a<br>b<br/>c", "<p>a<br>b<br>c</p>"),
    ("a|b\n-|-\n1|2", None),
    ("a|b\n-|-|-\n", "<p>a|b\n-|-|-</p>"),
    ("``a`b`` `c", "<p><code>a`b</code> `c</p>"),
]


def test_what_it_makes(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    for text, wanted in CASES:
        found = html(page, text)
        assert found == wanted or wanted is None


def test_emphasis_lists_and_tables(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    emphasis = (
        "<p><strong>b</strong> <em>i</em> <em><strong>x</strong></em> <strong>b</strong> <em>i</em> <del>d</del></p>"
    )
    assert html(page, CASES[2][0]) == emphasis
    nested = "<li><p>b</p><ul><li><p>c</p></li></ul><p>d</p></li>"
    assert html(page, CASES[6][0]) == f"<ul><li><p>a</p></li>{nested}<li><p>e</p></li></ul>"
    row = '<tr><td class="end">1</td><td><code>x|y</code></td></tr>'
    head = '<thead><tr><th class="end">a</th><th>b</th></tr></thead>'
    table = f'<div class="table"><table>{head}<tbody>{row.replace("|", "")}</tbody></table></div>'
    assert html(page, "| a | b |\n|--:|---|\n| 1 | `xy` |\n\nend") == f"{table}<p>end</p>"


def test_code_has_its_language_and_is_copied_as_it_is(server: Running, pages: Pages) -> None:
    page = pages.open(server.url, permissions=["clipboard-read", "clipboard-write"])
    code = "def f(x):\n    return `x` < 1  # **no** <b>\n\n\nf(2)\n"
    answer = say(page, f"So:\n\n```python title=x\n{code}```\n\nDone.")
    expect(answer.locator(".code .language")).to_have_text("python")
    assert answer.locator(".code code").text_content() == code
    answer.get_by_role("button", name="Copy").click()
    expect(answer.get_by_role("button", name="Copied")).to_be_visible()
    assert page.evaluate("navigator.clipboard.readText()") == code
    expect(answer.locator("p").last).to_have_text("Done.")


PIECES = [
    "# h",
    "- a",
    "  - b",
    "1. c",
    "> q",
    "```py",
    "```",
    "~~~",
    "| a | b |",
    "|---|:-:|",
    "|--",
    "***",
    "--",
    "\t\ti",
]
PIECES += ["", "", "  ", "text **b** `c` *x", "[l](http://e.org)", "    in", "a | b", "`", "* * *", "2) z", "1", "<br>"]


def test_piece_by_piece_is_the_same_as_in_one(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    rng = random.Random(1)
    for _ in range(60):
        text = "\n".join(rng.choices(PIECES, k=12))
        whole, pieces = both_ways(page, text)
        assert whole["html"] == pieces["html"], text


def test_only_the_last_block_is_made_again(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    block = "## Part\n\nSome **words** of `text`.\n\n- one\n- two\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
    block += "```py\nx = 1\n```\n\n"
    counts = []
    for n in (20, 200):
        whole, pieces = both_ways(page, block * n, step=7)
        assert pieces["html"] == whole["html"]
        counts.append(pieces["n"] / whole["n"])
    assert counts[1] < 1.1 * counts[0], "the work for a character does not grow with the text before it"
    for lines in ("- item **b**\n", "x = 1\n", "| 1 | 2 |\n"):
        head = {"x": "```\n", "|": "| a | b |\n|---|---|\n"}.get(lines[0], "")
        whole, pieces = both_ways(page, head + lines * 2000, step=5)
        assert pieces["html"] == whole["html"]
        assert pieces["n"] < 15 * whole["n"]


def test_marks_stay_in_the_text_and_tokens_show_it_all(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    first = round_of((" **bo", "cache"), ("ld**", "target"), number=1, hit=True)
    second = round_of(("\n\n- `x", "draft"), ("`\n- y", "ngram"), ("!", "random"), number=2)
    texts = [" **bold**", "\n\n- `x`\n- y!"]
    answer_with(page, chunk(first, content=texts[0]), chunk(second, content=texts[1], finish="stop"))
    ask(page, "say it")
    answer = finished(page)
    expect(answer.locator("strong")).to_have_text("bold")
    assert answer.locator("strong .token").evaluate_all("all => all.map(one => one.className)") == [
        "token cache",
        "token target",
    ]
    expect(answer.locator("li code .token.draft")).to_have_text("x")
    assert origins(answer) == {"cache", "target", "draft", "ngram", "random"}
    answer.locator("li code .round").hover()
    expect(answer.locator(".current").last).to_contain_text("!")
    assert answer.locator(".current").count() == 2, "the round is marked in both items"
    expect(page.locator("#round")).to_contain_text("Round 2")
    as_tokens(page)
    assert page.locator(".answer").text_content() == "".join(texts)
    assert page.locator(".answer .round.current").count() >= 1, "what is looked at stays so"
    page.get_by_role("radio", name="Text").check()
    expect(page.locator(".answer strong")).to_have_text("bold")


# ---- hostile answers

LINKS = [
    ("[x](javascript:alert(1))", None),
    ("[x](JaVaScRiPt:alert(1))", None),
    ("[x](java\tscript:alert(1))", None),
    ("[x](&#106;avascript:alert(1))", None),
    ("[x](data:text/html,<script>alert(1)</script>)", None),
    ("[x](vbscript:x)", None),
    ("[x](file:///etc/passwd)", None),
    ("[x](blob:http://a/b)", "http://a/b"),  # what looks like an address in text that is no link
    ("[x](//evil.org)", None),
    ("[x](/v1/models)", None),
    ("<javascript:alert(1)>", None),
    ('[x](https://e.org/" onmouseover="alert(1))', "https://e.org/"),
    ("[x](https://e.org/'onmouseover='alert(1))", "https://e.org/'onmouseover='alert(1)"),
    ("[x](mailto:a@b.org)", "mailto:a@b.org"),
    ("[a](http://one.org) b", "http://one.org/"),
    ("see https://two.org/x_(y)?z=1.", "https://two.org/x_(y)?z=1"),
    ("![alt](https://e.org/i.png)", "https://e.org/i.png"),
]


def test_links_lead_only_where_they_may(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer = say(page, "\n\n".join(text for text, _ in LINKS))
    links = answer.locator("a")
    assert links.evaluate_all("all => all.map(one => one.getAttribute('href'))") == [to for _, to in LINKS if to]
    for name, value in {"target": "_blank", "rel": "noopener noreferrer"}.items():
        assert set(links.evaluate_all(f"all => all.map(one => one.{name})")) == {value}
    attributes = "all => [...new Set(all.flatMap(one => one.getAttributeNames()))].sort()"
    assert links.evaluate_all(attributes) == ["href", "rel", "target", "title"]
    assert answer.locator("img").count() == 0


HTML = [
    "<script>document.title='taken'</script>",
    "<img src=x onerror=\"document.title='taken'\">",
    "<svg onload=\"document.title='taken'\">",
    "<iframe srcdoc=\"<script>parent.document.title='taken'</script>\"></iframe>",
    "<a href=\"javascript:document.title='taken'\">x</a>",
    "<style>* { display: none }</style>",
    "<details open ontoggle=\"document.title='taken'\">",
]
ALLOWED = {"A", "B", "BLOCKQUOTE", "BR", "BUTTON", "CODE", "DEL", "DIV", "EM", "H3", "H4", "H5", "H6", "HR", "LI", "OL"}
ALLOWED |= {
    "P",
    "PRE",
    "SPAN",
    "STRONG",
    "TABLE",
    "TBODY",
    "TD",
    "TH",
    "THEAD",
    "TR",
    "UL",
    "SUMMARY",
    "DETAILS",
    "SECTION",
}


SHAPES = ["{}", "# {}", "- {}", "> {}", "`{}`", "```\n{}\n```", "```{}\n```", "**{}**", "| {} |\n|---|\n| {} |"]
SHAPES += ["[{}](http://e.org)", "1. > {}"]


def test_html_is_text_wherever_it_is(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer = say(page, "\n\n".join(shape.replace("{}", one) for shape in SHAPES for one in HTML))
    tags = set(answer.locator("*").evaluate_all("all => all.map(one => one.tagName)"))
    assert {"H3", "LI", "BLOCKQUOTE", "CODE", "PRE", "STRONG", "TD", "A"} <= tags <= ALLOWED
    attributes = "all => [...new Set(all.flatMap(one => one.getAttributeNames()))].sort()"
    found = answer.locator("*").evaluate_all(attributes)
    assert found == ["class", "data-at", "href", "rel", "start", "target", "title", "type"]
    assert page.title() == "Saguaro"
    assert HTML[0] in (answer.text_content() or "")


def many(n: int, text: str) -> str:
    return text * (n // len(text))


SIZE = 100_000
HUGE = {
    "words": many(SIZE, "word **bold** `code` "),
    "one fence that never ends": "```\n" + many(SIZE, "x = 1\n"),
    "a line": "x" * SIZE,
    "a wide table": "|a" * 60 + "|\n" + "|-" * 60 + "|\n" + many(SIZE, "|1" * 60 + "|\n"),
    "a table of too many columns": "|a" * 20_000 + "|\n" + "|-" * 20_000 + "|\n",
    "a long table": "|a|b|\n|-|-|\n" + many(SIZE, "|1|2|\n"),
    "quotes in quotes": "> " * (SIZE // 2),
    "lists in lists": "".join("  " * n + "- x\n" for n in range(300)),
    "emphasis in emphasis": many(SIZE // 2, "**a ") + many(SIZE // 2, "a** "),
    "emphasis that never ends": many(SIZE, "*a **b "),
    "brackets": "[" * SIZE,
    "links that never end": many(SIZE, "[a]("),
    "links in links": many(SIZE // 2, "[a") + many(SIZE // 2, "](http://e.org)"),
    "ticks": "".join("`" * n + " " for n in range(400)),
    "spaces before a letter": "# " + " " * SIZE + "a",
    "a fence of spaces": "```" + " " * SIZE + "a`",
    "a divider of spaces": "|a|\n|-" + " " * SIZE + "x",
    "a rule of spaces": "-" + many(SIZE, "- ") + "x",
    "an address of parentheses": "http://e.org/" + ")" * SIZE,
    "backslashes": "\\" * SIZE,
    "numbers": "1" * SIZE + ". x",
    "short lines": many(SIZE, "a\n"),
}


@pytest.mark.parametrize("name", HUGE)
def test_a_huge_answer_stays_usable(server: Running, pages: Pages, name: str) -> None:
    """In 200 pieces. The driver's patience is far above what it takes and far below what a quadratic way takes."""
    page = pages.open(server.url)
    text = HUGE[name]
    size = -(-len(text) // 200)
    pieces = [text[at : at + size] for at in range(0, len(text), size)]
    rounds = [round_of((piece, "draft"), number=at + 1) for at, piece in enumerate(pieces)]
    chunks = [chunk(one, content=piece) for one, piece in zip(rounds, pieces, strict=True)]
    answer_with(page, *chunks, chunk(finish="stop"))
    ask(page, "say it")
    answer = finished(page)
    depth = "one => { let n = 0; for (; one; one = one.parentElement) n++; return n; }"
    deepest = answer.locator("*").evaluate_all(f"all => all.map({depth}).reduce((a, b) => Math.max(a, b))")
    assert deepest < 60
    as_tokens(page)
    assert page.locator(".answer").text_content() == text
    expect(page.locator("#prompt")).to_be_editable()


LEFTS = """one => {
  const range = document.createRange();
  const left = (node) => (range.selectNodeContents(node), range.getBoundingClientRect().left);
  return [...one.childNodes].map(left);
}"""


def test_characters_that_reorder_text_are_shown(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    text = "a \u202eb\u2066 `c\u202e d`\n\n```\nif x: \u202e# \u2066ok\n```"
    answer = say(page, text)
    boxes = answer.locator(".control")
    assert boxes.evaluate_all("all => all.map(one => one.dataset.code)") == [
        "U+202E",
        "U+2066",
        "U+202E",
        "U+202E",
        "U+2066",
    ]
    assert set(boxes.evaluate_all("all => all.map(one => getComputedStyle(one).display)")) == {"inline-block"}
    lefts = answer.locator("p .token").first.evaluate(LEFTS)
    assert len(lefts) == 5
    assert lefts == sorted(lefts), "from left to right, as they are written"
    as_tokens(page)
    assert page.locator(".answer").text_content() == text


def test_text_from_right_to_left_is_laid_out_so(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer = say(page, "\u05e9\u05dc\u05d5\u05dd \u05e2\u05d5\u05dc\u05dd\n\nand back")
    (hebrew, english) = answer.locator("p").all()
    edges = "one => [one.getBoundingClientRect(), one.firstChild.getBoundingClientRect()]"
    box, words = hebrew.evaluate(edges)
    assert words["right"] == pytest.approx(box["right"], abs=2)
    box, words = english.evaluate(edges)
    assert words["left"] == pytest.approx(box["left"], abs=2)
