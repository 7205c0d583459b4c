"""Links lead somewhere, the API reference has every public name, the paper map and the glossary name real code."""

import doctest
import importlib
import re

import pytest

import saguaro
from bench import docs_site
from bench.docs_site import OUTSIDE, ROOT, in_repository, is_inside, links

DOCUMENTS = [*OUTSIDE, *sorted(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md"))]
PLACE = re.compile(r"`([\w./]+\.(?:py|md|h|c))`(?::((?:,? `[\w.]+`)+))?")  # `file`: `name`, `name`


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def anchors(path: str) -> set[str]:
    """The anchors of a document's headings, as code hosts and the site name them."""
    text = re.sub(r"^```.*?^```", "", read(path), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_every_link_leads_somewhere(document: str) -> None:
    own = [f"#{anchor}" for anchor in re.findall(r"\]\(#([^)]*)\)", read(document))]
    for link in [*links(read(document)), *own]:
        path, anchor = (document, link) if link in own else in_repository(document, link)
        assert is_inside(path), f"{document} links to {link}"
        if anchor and path.endswith(".md"):
            assert anchor[1:] in anchors(path), f"{document} links to {link}: {path} has no such heading"


def test_a_wrong_link_is_seen() -> None:
    assert not is_inside(in_repository("docs/cpu.md", "saguaro/round.py")[0])
    assert "speed" in anchors("docs/cpu.md")
    assert "not-there" not in anchors("docs/cpu.md")


def test_the_api_reference_has_every_public_name() -> None:
    text = read("docs/api.md")
    assert set(re.findall(r"^\| `saguaro\.(\w+)`", text, re.MULTILINE)) == set(saguaro.__all__)
    described = re.findall(r"^::: saguaro\.(\S+)$", text, re.MULTILINE)
    assert {"LLM", "SamplingParams", "Structured", "EngineConfig", "errors", "method.Method"} <= set(described)
    for name in described:
        home, _, last = f"saguaro.{name}".rpartition(".")
        assert hasattr(importlib.import_module(home), last) or importlib.import_module(f"{home}.{last}"), name


@pytest.mark.parametrize(("path", "names"), PLACE.findall(read("docs/paper_map.md") + read("docs/glossary.md")))
def test_the_paper_map_and_the_glossary_name_real_code(path: str, names: str) -> None:
    source = read(path if path.startswith(("bench/", "docs/", "tests/")) else f"saguaro/{path}")
    for name in re.findall(r"\w+", names):
        assert re.search(rf"(def|class) {name}\b|^ *{name}(: .*)? = ", source, re.MULTILINE), f"{path} has no {name}"


def test_the_examples_of_the_sites_rules() -> None:
    found = doctest.testmod(docs_site)
    assert found.attempted > 0
    assert found.failed == 0
