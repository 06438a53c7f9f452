"""What mkdocs asks for: patterns in the navigation, links of a page to files of the repository, the order of search.

Pages are read in the repository as well, so they link to sources and measurements by relative paths. On the site a
picture is copied, and any other such link becomes the path as text. A link to a file that is not there is a warning,
which `mkdocs build --strict` turns into an error.
"""

from __future__ import annotations

import logging
import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
LOG = logging.getLogger("mkdocs.hooks.docs")
PICTURES = (".png", ".svg")
SEARCH = {"lab/": 0.1, "reference/support.md": 2.0}  # what is served comes first, notes of experiments last
_LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)#\s]+)(#[^)\s]*)?\)")


def expand(nav: list[Any], docs: Path, named: set[str]) -> list[Any]:
    """The navigation with a page for each file that a pattern stands for. Pages that are named elsewhere do not come
    twice; a section without pages falls away."""
    found: list[Any] = []
    for entry in nav:
        if isinstance(entry, dict):
            sections = {title: expand(inner, docs, named) for title, inner in entry.items() if isinstance(inner, list)}
            found += [{title: pages} for title, pages in sections.items() if pages]
        elif "*" in entry:
            found += sorted({path.relative_to(docs).as_posix() for path in docs.glob(entry)} - named)
        else:
            found.append(entry)
    return found


def pages_in(nav: list[Any]) -> set[str]:
    """The pages that a navigation names one by one."""
    inner = [pages_in(pages) for entry in nav if isinstance(entry, dict) for pages in entry.values()]
    return set().union(*inner) | {entry for entry in nav if isinstance(entry, str) and "*" not in entry}


def relink(markdown: str, page: str, docs: Path, root: Path = ROOT) -> tuple[str, list[str], set[str]]:
    """A page with its links out of `docs` replaced: the text, what is wrong, and the pictures that the site needs, by
    their path in the repository. page: its path in `docs`."""
    wrong: list[str] = []
    pictures: set[str] = set()

    def replace(match: re.Match[str]) -> str:
        picture, text, target, _ = match.groups()
        if "://" in target or target.startswith("mailto:"):
            return match[0]
        path = Path(os.path.normpath((docs / page).parent / target))
        if not path.is_relative_to(root) or not path.exists():
            wrong.append(f"{page}: {target} is not there")
            return match[0]
        if path.is_relative_to(docs):
            return match[0]
        name = path.relative_to(root).as_posix()
        if path.suffix not in PICTURES:
            return f"`{name}`" if text.strip("`") in (name, path.name) else f"{text} (`{name}`)"
        pictures.add(name)
        return f"{picture}[{text}]({os.path.relpath(name, os.path.dirname(page))})"

    return _LINK.sub(replace, markdown), wrong, pictures


def on_config(config: Any) -> Any:
    """Patterns of the navigation become pages."""
    config.nav = expand(config.nav, Path(config.docs_dir), pages_in(config.nav))
    return config


def on_files(files: Any, config: Any) -> Any:
    """Pictures of measurements come along."""
    docs = Path(config.docs_dir)
    for page in [file for file in files if file.src_uri.endswith(".md")]:
        for name in relink((docs / page.src_uri).read_text(encoding="utf-8"), page.src_uri, docs)[2]:
            if files.get_file_from_path(name) is None:
                files.append(type(page).generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Links out of the folder are replaced, and the page gets its weight in search."""
    boost = next((weight for start, weight in SEARCH.items() if page.file.src_uri.startswith(start)), 1.0)
    page.meta.setdefault("search", {"boost": boost})
    text, wrong, _ = relink(markdown, page.file.src_uri, Path(config.docs_dir))
    for message in wrong:
        LOG.warning(message)
    return text
