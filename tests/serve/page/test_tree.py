"""The tree of the round that is looked at: its nodes, the accepted path and the bonus, whatever the tokens say."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Locator, Page, expect

from tests.serve.http.driver import Running, running, tiny_llm
from tests.serve.page.driver import Json, Pages, answer_with, ask, chunk, finished, round_of, settle
from tests.serve.page.test_access import CONTRASTS, PHONE, fits
from tests.serve.page.test_keep import reload, spoil, stored

pytestmark = pytest.mark.browser

EVIL = "<img src=x onerror=\"document.title='taken'\">"

# A token, its parent and whether it was accepted: the second child of the root, and its third child.
BUSHY = [
    (" the", -1, False),
    (" a", -1, True),
    (" cat", 1, False),
    (" dog", 1, False),
    (" bird", 1, True),
    (" sat", 2, False),
    (" sang", 4, False),
]

# What is drawn: of every node its label, its parent's, its kind and its middle; of every line where it begins and ends.
NODES = """() => [...document.querySelectorAll("#tree [data-node]")].map((one) => {
  const box = one.querySelector(".box").getBBox();
  const named = document.querySelector(`#tree [data-node="${one.dataset.parent}"]`);
  return {
    label: one.querySelector(".label").textContent,
    parent: named?.querySelector(".label").textContent ?? null,
    kind: one.classList[1],
    left: box.x, right: box.x + box.width, y: box.y + box.height / 2,
  };
})"""
LINES = """() => [...document.querySelectorAll("#tree .edge")].map((one) => {
  const from = one.getPointAtLength(0), to = one.getPointAtLength(one.getTotalLength());
  return { kind: one.classList[1], from: [from.x, from.y], to: [to.x, to.y] };
})"""

PARENTS = "all => all.map((one) => [Number(one.dataset.parent), one.classList[1]])"


def tree_of(nodes: list[tuple[str, int, bool]], bonus: str | None = " flew", **fields: Any) -> Json:
    """A round that verified this tree."""
    drafted = [
        {"id": at, "text": text, "parent": parent, "accepted": accepted}
        for at, (text, parent, accepted) in enumerate(nodes)
    ]
    tokens = [(text, "draft") for text, _, accepted in nodes if accepted] + ([(bonus, "target")] if bonus else [])
    told = {"source": "draft", "drafted": drafted, "accepted": sum(one[2] for one in nodes)}
    return round_of(*tokens, **{**told, **fields})


def show(page: Page, *rounds: Json) -> Locator:
    """The answer of these rounds, with the first one looked at."""
    chunks = [chunk(one, content="".join(token["text"] for token in one["tokens"])) for one in rounds]
    answer_with(page, *chunks, chunk(finish="stop"))
    ask(page, "say it")
    answer = finished(page)
    answer.focus()
    page.keyboard.press("ArrowRight")
    return answer


def drawn(page: Page) -> list[tuple[str, str | None, str]]:
    return [(one["label"], one["parent"], one["kind"]) for one in page.evaluate(NODES)]


def test_nodes_path_and_bonus(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    expect(page.locator("#tree-figure")).to_be_hidden()
    show(page, tree_of(BUSHY))
    expect(page.locator("#tree-figure")).to_be_visible()
    assert drawn(page) == [
        ("␣the", None, "refused"),
        ("␣a", None, "accepted"),
        ("␣cat", "␣a", "refused"),
        ("␣dog", "␣a", "refused"),
        ("␣bird", "␣a", "accepted"),
        ("␣sat", "␣cat", "refused"),
        ("␣sang", "␣bird", "refused"),
        ("␣flew", "␣bird", "bonus"),
    ]
    expect(page.get_by_role("tree")).to_have_accessible_name("Tree of round 1: 7 nodes, 2 accepted.")
    # A line leads to every node, from the right edge of its parent, or from the text; the path is drawn over the rest.
    nodes, lines = {one["label"]: one for one in page.evaluate(NODES)}, page.evaluate(LINES)
    for one in nodes.values():
        (line,) = [each for each in lines if each["to"] == pytest.approx([one["left"], one["y"]], abs=0.1)]
        parent = nodes.get(one["parent"], {"right": 11, "y": nodes["␣the"]["y"]})
        assert line["from"] == pytest.approx([parent["right"], parent["y"]], abs=0.1)
        assert line["kind"] == one["kind"]
    assert [line["kind"] for line in lines] == ["refused"] * 5 + ["accepted"] * 2 + ["bonus"]


def test_nothing_is_drawn_over_something_else(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    full = [(f" token{at}", (at - 1) // 3 if at else -1, at in (0, 2, 8)) for at in range(64)]
    show(page, tree_of(full))
    nodes = page.evaluate(NODES)
    assert len(nodes) == 65
    for at, one in enumerate(nodes):
        for other in nodes[:at]:
            beside = one["right"] <= other["left"] or other["right"] <= one["left"]
            assert beside or abs(one["y"] - other["y"]) >= 20, (one, other)
    for one in nodes:
        below = [other["y"] for other in nodes if other["parent"] == one["label"]]
        assert below == sorted(set(below)), "siblings are below each other, likeliest first"
        lefts = {other["left"] for other in nodes if other["parent"] == one["label"]}
        assert len(lefts) <= 1
    box = page.locator("#tree-figure").bounding_box()
    assert box is not None
    assert box["height"] < 400, "a large tree scrolls in its frame"


def test_a_chain_is_a_line(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    words = [" one", " two", " three", " four"]
    chain = round_of((" one", "cache"), (" two", "cache"), (" 3", "target"), hit=True)
    show(page, {**chain, "drafted": [{"id": at, "text": text} for at, text in enumerate(words)]})
    assert drawn(page) == [
        ("␣one", None, "accepted"),
        ("␣two", "␣one", "accepted"),
        ("␣three", "␣two", "refused"),
        ("␣four", "␣three", "refused"),
        ("␣3", "␣two", "bonus"),
    ]
    nodes = page.evaluate(NODES)
    assert len({one["y"] for one in nodes[:4]}) == 1
    assert nodes[4]["y"] > nodes[0]["y"]
    show(page, {**chain, "drafted": chain["drafted"], "tokens": chain["tokens"]})
    assert drawn(page)[-1] == ("␣3", "␣two", "bonus")
    assert len({one["y"] for one in page.evaluate(NODES)}) == 1, "all was accepted: one line, with the bonus at its end"


def test_a_chain_whose_parents_are_told_is_a_chain(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    show(page, tree_of([(" one", -1, True), (" two", 0, False)], bonus=" 2"))
    expect(page.locator("#round")).to_contain_text("“ one two” was drafted just in time; 1 of 2 accepted")
    assert drawn(page) == [("␣one", None, "accepted"), ("␣two", "␣one", "refused"), ("␣2", "␣one", "bonus")]


def test_rounds_are_drawn_as_they_are_looked_at(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    nothing = round_of((" x", "target"), number=2, drafted=[], source="empty", hit=None)
    refused = tree_of([(" p", -1, False), (" q", -1, False)], number=3)
    cut = tree_of([(" end", -1, True)], bonus=None, number=4)
    answer = show(page, tree_of(BUSHY), nothing, refused, cut)
    assert len(drawn(page)) == 8
    page.keyboard.press("ArrowRight")
    expect(page.locator("#tree-figure")).to_be_hidden()
    answer.locator("[data-at='2']").first.hover()
    assert drawn(page) == [("␣p", None, "refused"), ("␣q", None, "refused"), ("␣flew", None, "bonus")]
    page.locator("#strip g").nth(3).hover()
    assert drawn(page) == [("␣end", None, "accepted")]
    page.reload()
    expect(page.locator("#tree-figure")).to_be_hidden()
    page.locator(".answer .round").first.hover()
    assert len(drawn(page)) == 8, "kept over a reload"
    page.get_by_role("button", name="New chat").click()
    expect(page.locator("#tree-figure")).to_be_hidden()


def test_by_keyboard(server: Running, pages: Pages) -> None:
    page = pages.open(server.url)
    answer = show(page, tree_of(BUSHY))
    page.keyboard.press("Enter")
    for key, name in [
        ("", "“␣the”: refused, depth 1, number 1 of 2 after its parent"),
        ("ArrowDown", "“␣a”: accepted, depth 1, number 2 of 2 after its parent"),
        ("ArrowDown", "“␣a”"),
        ("ArrowRight", "“␣cat”: refused, depth 2, number 1 of 3 after its parent"),
        ("ArrowDown", "“␣dog”"),
        ("ArrowDown", "“␣bird”: accepted, depth 2, number 3 of 3 after its parent"),
        ("ArrowUp", "“␣dog”"),
        ("ArrowLeft", "“␣a”"),
        ("End", "“␣flew”: the target's own token, depth 3"),
        ("ArrowLeft", "“␣bird”"),
        ("Home", "“␣the”"),
    ]:
        if key:
            page.keyboard.press(key)
        focused = page.locator("#tree :focus")
        expect(focused).to_have_accessible_name(re.compile(f"^{re.escape(name)}"))
        expect(focused).to_have_role("treeitem")
        expect(page.locator("#node")).to_have_text(re.compile(f"^{re.escape(name)}"))
        expect(page.locator("#tree [tabindex='0']")).to_have_count(1)
    page.keyboard.press("Escape")
    expect(answer).to_be_focused()
    page.locator("#tree .node.bonus").hover()
    expect(page.locator("#node")).to_contain_text("the target's own token")


@pytest.mark.parametrize(
    ("text", "label"),
    [
        (EVIL, "<img␣src=x␣on…"),
        ("</text><script>document.title='taken'</script>", "</text><scrip…"),
        ("\u202eevil\u2066", "U+202EevilU+2…"),
        ("a\nb\tc", "a↵b⇥c"),
        ("\x00\u200b", "U+0000U+200B"),
        ("\u05e9\u05dc", "\u05e9\u05dc"),
        ("", "#0"),
        ("x" * 5000, "x" * 13 + "…"),
        ("__proto__", "__proto__"),
    ],
)
def test_hostile_tokens_are_text(server: Running, pages: Pages, text: str, label: str) -> None:
    page = pages.open(server.url)
    show(page, tree_of([(text, -1, True), (text, 0, False)], bonus=text, source=EVIL))
    assert drawn(page)[0] == (label, None, "accepted")
    names = page.locator("#tree *").evaluate_all("all => [...new Set(all.map(one => one.tagName))].sort()")
    assert names == ["circle", "g", "path", "rect", "text", "title"]
    page.locator("#tree [data-node]").first.hover()
    assert page.locator("#node *").count() == 0
    assert not re.search("[\u202a-\u202e\u2066-\u2069]", page.locator("#tree-figure").text_content() or "")
    assert page.title() == "Saguaro"
    assert page.locator("#tree").evaluate("one => one.getBBox().width") < 600


@pytest.mark.parametrize("spoiled", [{"parent": 5}, {"parent": 2}, {"parent": -2}, {"parent": "0"}, {"accepted": 1}])
def test_a_kept_tree_that_is_none_is_dropped(server: Running, pages: Pages, spoiled: Json) -> None:
    page = pages.open(server.url)
    show(page, tree_of(BUSHY))
    page.reload()
    expect(page.locator(".turn")).to_have_count(1)
    found = stored(page)
    found["turns"][0]["answers"][0]["rounds"][0]["drafted"][2] |= spoiled
    spoil(page, json.dumps(found))
    reload(page)
    expect(page.locator("#welcome")).to_be_visible()
    expect(page.locator(".turn")).to_have_count(0)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_can_be_read(server: Running, pages: Pages, scheme: Any) -> None:
    page = pages.open(server.url, color_scheme=scheme)
    for source in ("cache", "draft", "ngram", "suffix", "random"):
        show(page, tree_of(BUSHY, source=source))
        found = page.evaluate(CONTRASTS)
        assert {"␣bird", "␣cat", "␣flew", "refused"} <= {text for text, _ in found}
        assert {text: ratio for text, ratio in found if ratio < 4.5} == {}
    looks = """one => {
      const { strokeDasharray, strokeWidth } = getComputedStyle(one.querySelector(".box"));
      return [strokeDasharray, strokeWidth, one.querySelector(".box").rx.baseVal.value].join(" ");
    }"""
    kinds = [
        page.locator(f"#tree .{kind}[data-node]").first.evaluate(looks) for kind in ("accepted", "refused", "bonus")
    ]
    assert len(set(kinds)) == 3, "kinds differ without colour"


def test_it_fits_a_phone(server: Running, pages: Pages) -> None:
    page = pages.open(server.url, **PHONE)
    show(page, tree_of([(f" node{at}", at - 1, True) for at in range(64)]))
    assert len(page.evaluate(NODES)) == 65
    assert fits(page)
    page.keyboard.press("Enter")
    page.keyboard.press("End")
    expect(page.locator("#tree .node.bonus")).to_be_in_viewport()


def test_trees_of_a_server(folder: Path, pages: Pages) -> None:
    """Every round of an answer is drawn as the server told it."""
    with running(tiny_llm(folder, method="sd", nodes=8, width=2)) as server:
        page = pages.open(server.url)
        settle(page, Max_tokens="40")
        ask(page, "the end")
        answer = finished(page)
        rounds: list[Json] = answer.evaluate("one => one.answer.rounds")
        assert any(len({node["parent"] for node in one["drafted"] if "parent" in node}) > 1 for one in rounds)
        answer.focus()
        for one in rounds:
            page.keyboard.press("ArrowRight")
            if not one["drafted"]:
                expect(page.locator("#tree-figure")).to_be_hidden()
                continue
            nodes = [
                (node.get("parent", at - 1), "accepted" if node.get("accepted", at < one["accepted"]) else "refused")
                for at, node in enumerate(one["drafted"])
            ]
            if one["tokens"][-1]["origin"] == "target":
                path = [at for at, (_, kind) in enumerate(nodes) if kind == "accepted"]
                nodes.append((path[-1] if path else -1, "bonus"))
            found = page.locator("#tree [data-node]").evaluate_all(PARENTS)
            assert [tuple(each) for each in found] == nodes
