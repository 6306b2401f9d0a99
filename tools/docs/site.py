"""Hooks of mkdocs.yml: links to code, headings and folders.

A link out of docs/ leads to a file of the checkout in which the site was built. One that leads nowhere is a warning,
which makes a strict build fail.
"""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from pymdownx.slugs import slugify

LOG = logging.getLogger("mkdocs.plugins.site")
LINK_OUT = re.compile(r"\[((?:[^][]|\[[^][]*\])*)\]\(((?:\.\./)+[^)\s]*)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Name headings as GitHub does, and put all pages of a folder where the nav names it, as in `decisions/`."""
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    config.nav = [_with_folders(entry, Path(config.docs_dir)) for entry in config.nav]
    return config


def _with_folders(entry: Any, documents: Path) -> Any:
    if not isinstance(entry, dict):
        return entry
    [(title, below)] = entry.items()
    if isinstance(below, list):
        return {title: [_with_folders(one, documents) for one in below]}
    if below.endswith("/"):
        return {title: sorted(str(page.relative_to(documents)) for page in (documents / below).glob("*.md"))}
    return entry


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Turn links out of docs/ into HTML, which mkdocs leaves as it is, and check them."""
    source = Path(page.file.abs_src_path)
    documents = Path(config.docs_dir).resolve()

    def leave(match: re.Match[str]) -> str:
        text, link = match.groups()
        target = (source.parent / link.partition("#")[0]).resolve()
        if target.is_relative_to(documents):
            return match[0]
        if not target.exists():
            LOG.warning("%s links to %s, which does not exist", page.file.src_uri, link)
        return f'<a href="{link}">{text}</a>'

    fences = [(match.start(), match.end()) for match in FENCE.finditer(markdown)]
    parts, position = [], 0
    for start, end in fences:
        parts += [LINK_OUT.sub(leave, markdown[position:start]), markdown[start:end]]
        position = end
    return "".join([*parts, LINK_OUT.sub(leave, markdown[position:])])
