"""Hooks of the documentation's site (mkdocs.yml). Build it with `make docs`.

Documents link relative to their place in the repository. On the site, a link to a document leads to its page. A link
to any other file or folder leads to a page with its content, which is made for this link. Invariant: a relative link
that names nothing in the repository is a warning, and so an error of a strict build.
"""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from posixpath import normpath, relpath
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

log = logging.getLogger("mkdocs.hooks.docs_site")

ROOT = Path(__file__).parent.parent
OUTSIDE = {  # documents outside docs/, and the files of their pages
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/README.md": "deploy.md",
}
HOME = "docs/README.md"  # the list of documents: on the site, the navigation takes its place
LANGUAGES = {".py": "python", ".js": "javascript", ".c": "c", ".h": "c", ".json": "json", ".yml": "yaml"}
MAX_BYTES = 2**18  # of a file that is shown

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)
_FENCE = re.compile(r"^ *(`{3,}|~{3,}).*?^ *\1 *$", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(?<=\]\()([^()\s]+)(?=\))|(?<=\bsrc=\")([^\"]+)(?=\")|(?<=\bhref=\")([^\"]+)(?=\")")


def fenced(docstring: str) -> str:
    r"""The docstring with its examples (`>>>`) in code blocks.

    >>> fenced(">>> 1 + 1\n2")
    '```pycon\n>>> 1 + 1\n2\n```'
    """
    return _EXAMPLE.sub(lambda example: f"```pycon\n{example.group()}\n```", docstring)


def links(text: str) -> list[str]:
    """The targets of a document's relative links, images included. Code blocks have none.

    >>> links("[a](b.md#c), ![d](e.svg), [f](https://g)")
    ['b.md#c', 'e.svg']
    """
    found: list[str] = []

    def note(target: str) -> str:
        found.append(target)
        return target

    relink(text, note)
    return found


def relink(text: str, change: Callable[[str], str]) -> str:
    """The text with every relative link's target changed.

    >>> relink("[a](b.md), [c](#d)", str.upper)
    '[a](B.MD), [c](#d)'
    """
    parts, end = [], 0
    for fence in _FENCE.finditer(text):
        parts += [_relink(text[end : fence.start()], change), fence.group()]
        end = fence.end()
    return "".join([*parts, _relink(text[end:], change)])


def _relink(text: str, change: Callable[[str], str]) -> str:
    return _LINK.sub(lambda m: m.group() if re.match(r"#|/|\w+:", m.group()) else change(m.group()), text)


def in_repository(document: str, target: str) -> tuple[str, str]:
    """The path in the repository that a link of a document names, and its anchor.

    >>> in_repository("docs/cpu.md", "../saguaro/round.py"), in_repository("README.md", "docs/cpu.md#speed")
    (('saguaro/round.py', ''), ('docs/cpu.md', '#speed'))
    """
    path, sharp, anchor = target.partition("#")
    return normpath(f"{document}/../{path}"), sharp + anchor


def document_of(page: str) -> str:
    """The document of a page's file.

    >>> document_of("contributing.md"), document_of("cpu.md")
    ('CONTRIBUTING.md', 'docs/cpu.md')
    """
    return next((path for path, uri in OUTSIDE.items() if uri == page), f"docs/{page}")


def page_of(path: str) -> str:
    """The file of the page that shows a path of the repository.

    >>> page_of("docs/cpu.md"), page_of("CHANGELOG.md"), page_of("saguaro/round.py"), page_of("docs/round.svg")
    ('cpu.md', 'changelog.md', 'source/saguaro/round.py.md', 'round.svg')
    """
    if path == HOME:
        return OUTSIDE["README.md"]
    if path in OUTSIDE:
        return OUTSIDE[path]
    return path.removeprefix("docs/") if path.startswith("docs/") else f"source/{path}.md"


def shown(path: str) -> str:
    """The page of a source file or folder, as Markdown. It is left out of the search."""
    place = ROOT / path
    head = f"---\nsearch:\n  exclude: true\nhide: [toc]\n---\n\n# `{path}`\n\n"
    if place.is_dir():
        names = sorted(child.name + "/" * child.is_dir() for child in place.iterdir() if child.name[0] not in "._")
        return head + "\n".join(f"- `{name}`" for name in names) + "\n"
    text = place.read_text(encoding="utf-8")
    language = LANGUAGES.get(place.suffix, "text")
    return f"{head}`````{language}\n{text}`````\n"


def on_files(files: "Files", config: "MkDocsConfig") -> "Files":
    """Add the documents outside docs/ and the pages of linked sources."""
    from mkdocs.structure.files import File, InclusionLevel

    for path, uri in OUTSIDE.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for path in sorted(_sources(files)):
        if (ROOT / path).is_dir() or (ROOT / path).stat().st_size <= MAX_BYTES:
            files.append(
                File.generated(config, page_of(path), content=shown(path), inclusion=InclusionLevel.NOT_IN_NAV)
            )
        else:
            log.warning("%s has more than %d bytes: do not link to it", path, MAX_BYTES)
    return files


def _sources(files: "Files") -> set[str]:
    """The linked paths that are no documents. The others are reported when their page is read."""
    documents = [document_of(file.src_uri) for file in files.documentation_pages()]
    targets = {in_repository(d, link)[0] for d in documents for link in links((ROOT / d).read_text(encoding="utf-8"))}
    return {path for path in targets if page_of(path).startswith("source/") and is_inside(path)}


def is_inside(path: str) -> bool:
    """Whether the repository has this file or folder."""
    return not path.startswith("..") and (ROOT / path).exists()


def on_page_markdown(markdown: str, page: "Page", config: "MkDocsConfig", files: "Files") -> str:
    """Turn links of the repository into links of the site."""
    uri = page.file.src_uri
    if uri.startswith("source/"):
        return markdown
    document = document_of(uri)

    def to_page(link: str) -> str:
        path, anchor = in_repository(document, link)
        file = files.get_file_from_path(page_of(path))
        if not is_inside(path):
            log.warning("%s links to %s, which is not in the repository", document, link)
        elif file is None or file.inclusion.is_excluded():
            log.warning("%s links to %s, which is not on the site: name it without a link", document, link)
        return relpath(page_of(path), f"{uri}/..") + anchor

    return relink(markdown, to_page)
