# SPDX-License-Identifier: Apache-2.0
"""The page of HugeCTR's samples is made of a repository with releases."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch absent")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "hugectr_samples.py"
ERROR = "import hugectr\nimport no_such_framework\n"


@pytest.fixture
def samples() -> Any:
    """The script, as a module."""
    spec = importlib.util.spec_from_file_location("hugectr_samples", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _git(folder: Path, *arguments: str) -> None:
    names = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
    subprocess.run(["git", "-C", str(folder), *names, *arguments], check=True, capture_output=True)


def _release(folder: Path, tag: str, files: dict[str, str]) -> None:
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    _git(folder, "add", "-A")
    _git(folder, "commit", "--allow-empty", "-m", tag)
    _git(folder, "tag", tag)


def test_page_says_what_ran_and_why_not(
    samples: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "repository"
    folder.mkdir()
    _git(folder, "init", "-q")
    _release(folder, "v2.2", {"samples/old.py": "import hugectr\n"})
    (folder / "samples/old.py").unlink()
    files = {
        "samples/a/a.json": json.dumps({"solver": {}, "layers": [{"name": "one"}]}),
        "samples/b/b.py": ERROR,
        "samples/b/convert.py": "import torch\n",
        "test/plan.json": "[]",
        "HugeCTR/include/parser.hpp": 'line\nthrow(name + ", bottom tensor name does not exists");\n',
        "samples/c/c.py": "import hugectr\n",
    }
    _release(folder, "v2.3", files)
    renamed = json.dumps({"solver": {"gpu": [0, 1]}, "layers": [{"name": "two"}]})
    _release(folder, "v3.0", {"samples/a/a.json": renamed})
    run: list[str] = []

    def outcome(repository: Any, sample: Any, work: Path) -> Any:
        run.append(sample.path)
        if sample.path.endswith("c.py"):
            return samples.Outcome(False, "fc.bottom_names: no layer above makes it, got 'x'.", 1.0)
        if sample.path.endswith(".py"):
            text = samples._reason("Traceback\nModuleNotFoundError: No module named 'x.y'\n")
            return samples.Outcome(False, text, 1.0)
        return samples.Outcome(True, "ran", 1.0)

    page = tmp_path / "page.md"
    monkeypatch.setattr(samples, "run", outcome)
    arguments = ["script", str(folder), "--work", str(tmp_path / "work"), "--page", str(page)]
    monkeypatch.setattr(sys, "argv", arguments)
    samples.main()

    # the second a.json says the same
    assert run == ["samples/a/a.json", "samples/b/b.py", "samples/c/c.py"]
    text = page.read_text()
    assert "2 of 4 files run." in text
    assert (
        "no layer above makes it, got 'x'. HugeCTR throws too: HugeCTR/include/parser.hpp:2 of "
        in text
    )
    assert "| samples/b/b.py | v2.3 to v3.0 | imports another framework: x |" in text
    rows = [line for line in text.splitlines() if line.startswith("| samples/a/a.json | v")]
    assert [row.split(" | ")[1] for row in rows] == ["v2.3", "v3.0"]
    assert all(row.endswith("| ran |") for row in rows)
    assert "does not import hugectr (torch) |" in text
    assert "| test/plan.json | v2.3 to v3.0 |" in text
    assert "samples/old.py" not in text
