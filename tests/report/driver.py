"""A runner on a tiny pair, and a reading of pages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from saguaro import LLM
from saguaro.report.cell import Profile
from saguaro.report.engines import LoadedPair, Pair
from saguaro.report.experiment import Experiment
from saguaro.report.report import Report
from saguaro.report.runner import Runner
from saguaro.report.store import Store
from tests.report.conftest import TEXTS

CIRCUMSTANCES = {"versions": {"saguaro": "1"}, "machine": {"cpu": "a CPU", "cores": 2, "gpu": None}}
LOADS = ("src", "srcset", "action", "background", "data", "poster", "xlink:href")


class Said(list[str]):
    """What a runner said, and what it loaded."""

    n_loaded = 0


def runner_on(model: Path, out: Path, profile: Profile, said: Said, basis: dict[str, Any] | None = None) -> Runner:
    """A runner on a tiny pair; it counts how often the pair is loaded."""

    def load() -> Pair:
        said.n_loaded += 1
        base = LLM(model, method="ar", draft="drop:1", device="cpu", dtype="float32", threads=1, kv_memory="1MiB")
        return LoadedPair("tiny", base, chat=True, n_output=profile.max_tokens)

    return Runner(
        store=Store(out, basis or {}, {}),
        pairs={"tiny": load},
        texts=TEXTS,
        rows=max(profile.batches),
        circumstances=CIRCUMSTANCES,
        tell=said.append,
    )


def report_of(profile: Profile, experiments: Sequence[Experiment]) -> Report:
    return Report(profile=profile, experiments=experiments, command="saguaro report --quick")


def read_page(text: str) -> ElementTree.Element:
    """The page as a tree. Raises if it is not well-formed."""
    assert text.startswith("<!DOCTYPE html>\n")
    return ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>\n"))


def words(element: ElementTree.Element) -> str:
    """All text of an element."""
    return " ".join("".join(element.itertext()).split())


def loaded_from_outside(page: ElementTree.Element) -> list[str]:
    """Everything that a browser would fetch: each reference that is not into the page itself."""
    found = []
    for element in page.iter():
        for name, value in element.attrib.items():
            is_link = name.rpartition("}")[2] == "href" and not value.startswith("#")
            if is_link or name in LOADS or "url(" in value.replace("url(#", ""):
                found.append(f"{element.tag} {name}={value}")
        if element.tag.rpartition("}")[2] in ("script", "iframe", "object", "embed", "link", "img"):
            found.append(element.tag)
        if element.tag == "style" and any(word in (element.text or "") for word in ("url(", "@import")):
            found.append("style")
    return found
