"""The documents build as a site: every link and anchor leads somewhere, and no page asks the network for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LOADED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>')


def test_the_site_builds_and_opens_from_its_folder_without_a_network(tmp_path: Path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", tmp_path],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    pages = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.html")}
    assert {loaded for page in pages.values() for loaded in LOADED.findall(page)} == set()
    assert all("iframe-worker" in page for page in pages.values())
    assert (tmp_path / "search" / "search_index.js").exists()
    assert "request_timeout_s" in pages["reference/settings.html"]
    assert "--attainment" in pages["reference/cli.html"]


def test_no_page_draws_with_what_the_site_would_load_from_the_network():
    drawn = [page for page in (REPOSITORY / "docs").rglob("*.md") if "```mermaid" in page.read_text()]
    assert not drawn, "commit an SVG instead"


def test_what_a_page_would_load_from_the_network_would_be_found():
    assert LOADED.findall('<a href="https://x.example">x</a><script src="https://x.example/y.js"></script>')
    assert not LOADED.findall('<a href="https://x.example">x</a><script src="assets/y.js"></script>')
