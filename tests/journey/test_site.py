# SPDX-License-Identifier: Apache-2.0
"""The documentation site is built without a warning, and holds every public name."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

import hotbed as hb

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"


def test_every_public_name_and_every_page_has_its_place_on_the_site() -> None:
    settings = runpy.run_path(str(DOCS / "conf.py"))
    modules = [module for listed in settings["PAGES"].values() for module in listed]
    assert set(settings["names_by_module"]()) <= set(modules)
    entries = [entry for listed in settings["NAVIGATION"].values() for entry in listed]
    pages = {page.relative_to(DOCS).with_suffix("").as_posix() for page in DOCS.rglob("*.md")}
    missing = {page for page in pages if not page.startswith("reference/")} - {*entries, "index"}
    assert not missing, "not in NAVIGATION of docs/conf.py"
    assert len(entries) == len(set(entries))


@pytest.mark.soak
def test_the_site_is_built_without_a_warning_and_holds_every_public_name(tmp_path: Path) -> None:
    site = tmp_path / "site"
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "-q",
        "-W",
        "--keep-going",
        "-d",
        str(tmp_path / "cache"),
    ]
    done = subprocess.run(
        [*command, str(ROOT / "docs"), str(site)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    pages = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    classes = [name for name in hb.__all__ if isinstance(getattr(hb, name), type)]
    missing = [name for name in classes if f'.{name}"' not in pages]
    assert not missing
