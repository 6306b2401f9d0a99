"""The documents build as a site: every link and anchor leads somewhere, and no page asks the network for anything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LOADED = re.compile(r'<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)="?(?:https?:)?//[^>]*>')


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder],
        cwd=REPOSITORY,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    return folder


def test_every_page_opens_from_the_folder_without_a_network(site: Path):
    pages = [page.read_text() for page in site.rglob("*.html")]
    assert len(pages) > 20
    assert not [loaded for page in pages for loaded in LOADED.findall(page)]
    assert all("iframe-worker" in page for page in pages)
    assert (site / "search" / "search_index.js").exists()


def test_settings_and_commands_are_written_from_the_code(site: Path):
    assert "request_deadline_s" in (site / "reference" / "settings.html").read_text()
    assert "--find-rate" in (site / "reference" / "cli.html").read_text()


def test_no_page_draws_with_what_the_site_would_load_from_the_network():
    drawn = [page for page in (REPOSITORY / "docs").rglob("*.md") if "```mermaid" in page.read_text()]
    assert not drawn, "commit an SVG instead"
