"""The documentation: every example runs, every link leads somewhere, and what people look for has a section.

Regressions these catch: an example of an argument that is gone, a link to a page that moved, a page that the site's
navigation does not reach, a question that nobody answers any more.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
import yaml

from scripts.docs_hooks import expand, pages_in, relink

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
OPTIONAL = ("comfy", "diffusers", "transformers")  # what an integration is for, and need not be installed
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks" / "README.md", *sorted(DOCS.rglob("*.md"))]
_FENCE = re.compile(r"^(?:<!-- not run: (?P<why>.+) -->\n+)?```python\n(?P<code>.*?)^```$", re.M | re.S)
_ANCHOR = re.compile(r"\[[^\]]*\]\(([^)#\s]*)#([^)\s]+)\)")


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def examples(page: Path) -> list[str]:
    """The Python of a page that is to be run: all but what says why not, in a comment before it. On the CPU."""
    found = [match["code"] for match in _FENCE.finditer(page.read_text(encoding="utf-8")) if not match["why"]]
    return [code.replace('device="cuda"', 'device="cpu"') for code in found]


def anchors(text: str) -> set[str]:
    """The sections of a page, as links name them."""
    titles = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S), re.M)
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title.lower()).strip()) for title in titles}


@pytest.mark.parametrize("page", [page for page in PAGES if examples(page)], ids=name_of)
def test_the_examples_of_a_page_run(page: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, as a reader would type them."""
    torch.manual_seed(0)
    names: dict[str, object] = {}
    for number, code in enumerate(examples(page), 1):
        try:
            exec(compile(code, f"{name_of(page)}, example {number}", "exec"), names)
        except ModuleNotFoundError as error:
            if error.name not in OPTIONAL:
                raise
            pytest.skip(str(error))


def test_examples_are_found() -> None:
    assert len([page for page in PAGES if examples(page)]) > 8
    text = "a\n<!-- not run: needs a card -->\n```python\nx = 1\n```\nb\n```python\ny = 2\n```\n"
    assert [(match["why"], match["code"]) for match in _FENCE.finditer(text)] == [
        ("needs a card", "x = 1\n"),
        (None, "y = 2\n"),
    ]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    _, wrong, _ = relink(text, name_of(page), ROOT)
    assert wrong == []
    for target, section in _ANCHOR.findall(text):
        if "://" not in target:
            path = page.parent / target if target else page
            assert section in anchors(path.read_text(encoding="utf-8")), f"{name_of(page)}: {target}#{section}"


def test_the_navigation_reaches_every_page() -> None:
    nav = yaml.load((ROOT / "mkdocs.yml").read_text(), Loader=yaml.SafeLoader)["nav"]
    expanded = expand(nav, DOCS, pages_in(nav))
    assert pages_in(expanded) == {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}


def test_a_pattern_in_the_navigation(tmp_path: Path) -> None:
    for name in ("a/x.md", "a/y.md", "b.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    nav = [{"A": ["a/y.md", "a/*.md"]}, {"None": ["c/*.md"]}, {"B": ["b*.md"]}]
    assert expand(nav, tmp_path, pages_in(nav)) == [{"A": ["a/y.md", "a/x.md"]}, {"B": ["b.md"]}]


def test_links_out_of_the_folder_become_text_and_pictures_come_along(tmp_path: Path) -> None:
    docs = tmp_path / "docs"
    docs.mkdir()
    for name in ("docs/b.md", "code.py", "plot.png"):
        (tmp_path / name).touch()
    page = "[b](b.md#s) [code.py](../code.py) [how](../code.py) ![p](../plot.png) [gone](c.md) [w](https://x.y/z)"
    text, wrong, pictures = relink(page, "a.md", docs, tmp_path)
    assert text == "[b](b.md#s) `code.py` how (`code.py`) ![p](plot.png) [gone](c.md) [w](https://x.y/z)"
    assert wrong == ["a.md: c.md is not there"] and pictures == {"plot.png"}


QUESTIONS = json.loads((ROOT / "scripts" / "questions.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_question_has_a_section(question: str) -> None:
    """What the site's search finds is words of a section: its title, or the text below it. scripts/ask_site.mjs asks
    the search itself, where the site is built."""
    page, section = QUESTIONS[question].split("#")
    text = (DOCS / page).read_text(encoding="utf-8")
    assert section in anchors(text)
    parts = {
        next(iter(anchors(part.splitlines()[0])), ""): part for part in re.split(r"^(?=#+ )", text, flags=re.M)[1:]
    }
    assert question.lower() in parts[section].lower()


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
