# SPDX-License-Identifier: Apache-2.0
"""`import hotbed` is cheap, lazy and has one sorted public list."""

from __future__ import annotations

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import hotbed as hb

ROOT = Path(__file__).parents[2]

# Runs before anything else in a child process: the named modules cannot be imported, as if they
# were not installed.
BLOCKER = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocker())
"""


def run_without(blocked: set[str], code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKER.format(blocked=blocked) + code],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_public_list_is_sorted_and_short() -> None:
    assert list(hb.__all__) == sorted(set(hb.__all__))
    assert len(hb.__all__) <= 75


@pytest.mark.parametrize("name", hb.__all__)
def test_every_public_name_exists(name: str) -> None:
    assert getattr(hb, name) is not None
    assert name in dir(hb)


def test_type_checkers_see_the_same_public_list() -> None:
    tree = ast.parse(Path(hb.__file__).read_text())
    block = next(node for node in tree.body if isinstance(node, ast.If))
    seen = {
        alias.asname
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == set(hb.__all__)


def test_every_rule_policy_tier_and_init_is_public() -> None:
    from hotbed import config
    from hotbed.embedding import init, policy, rule, tier

    for base in (rule.Rule, policy.Admission, policy.Eviction, tier.Tier, init.Init):
        for cls in config.kinds(base).values():
            assert cls.__name__ in hb.__all__


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Tabel'"):
        hb.Tabel  # noqa: B018


def test_import_hotbed_loads_no_heavy_module() -> None:
    code = "import hotbed; print([m for m in ('torch', 'numpy', 'pyarrow', 'polars', 'typer') if m in sys.modules])"
    assert run_without(set(), code).strip() == "[]"


def test_tables_schemas_and_sources_work_without_torch() -> None:
    code = """
import hotbed as hb
hb.Schema, hb.Encoder, hb.Dataset, hb.sources.Csv, hb.transforms.Hash, hb.Adagrad(lr=0.1), hb.Job
t = hb.make_tables(hb.Schema([hb.Label("click"), hb.Id("user")]), dim=2)["user"]
first, second, again = t.find_or_insert([1, 2, 1])
print(first == again != second, "torch" in sys.modules)
"""
    assert run_without({"torch"}, code).strip() == "True False"


@pytest.mark.parametrize(
    "name", ["RecModel", "EmbeddingCollection", "SparseOptimizer", "models", "load"]
)
def test_a_name_without_its_extra_says_what_to_install(name: str) -> None:
    code = f"""
import hotbed as hb
try:
    hb.{name}
except hb.errors.MissingExtra as error:
    print(error)
"""
    assert run_without({"torch"}, code).strip() == (
        f"hotbed.{name}: torch is not installed. Run pip install hotbed[train]."
    )


def test_the_extra_all_holds_every_extra_of_users() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    (every,) = extras["all"]
    assert sorted(every.removeprefix("hotbed[").removesuffix("]").split(",")) == sorted(
        extras.keys() - {"all", "test", "bench", "docs", "dev"}
    )


def test_predictions_may_be_indexed_under_strict_typing() -> None:
    """Their type depends on the number of labels: a union would forbid `scores[0]`."""
    from hotbed.serving.client import Client
    from hotbed.serving.session import InferenceSession

    for predict in (InferenceSession.predict, Client.predict):
        assert predict.__annotations__["return"] == "Any"
