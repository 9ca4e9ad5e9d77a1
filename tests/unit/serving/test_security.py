# SPDX-License-Identifier: Apache-2.0
"""A model from a stranger reads no file outside of its folder and runs none of its code."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from forked import COMMANDS

import hotbed as hb
from hotbed.errors import ConfigError, FormatError, PersistError
from hotbed.persist.container.manifest import sealed
from hotbed.yaml_files import parse_value

ROOT = Path(__file__).resolve().parents[3]
OUTSIDE = [
    "../../secret",
    "/etc/hostname",
    "tables/../../x",
    "..\\secret",
    "C:\\secret",
    "\\\\host\\secret",
]


def forged(exported: Path, to: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of an exported model whose manifest was changed by somebody who knows how to seal it."""
    shutil.copytree(exported, to)
    (to / "CURRENT").unlink()
    (path,) = to.glob("*/MANIFEST.json")
    manifest = json.loads(path.read_text())
    del manifest["digest"]
    change(manifest)
    path.write_text(sealed(manifest)[0])
    return path.parent


def test_the_forgery_itself_loads(exported: Path, tmp_path: Path) -> None:
    hb.ParameterServer().load("m", forged(exported, tmp_path / "copy", lambda manifest: None))


def test_onnx_runtime_keeps_and_sends_no_report_of_served_models(
    exported: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    for name in ("CI", "ORT_DISABLE_TELEMETRY"):  # with them it reports to nobody
        environment.pop(name, None)
    code = f"import hotbed as hb; hb.InferenceSession({str(exported)!r})"
    subprocess.run([sys.executable, "-c", code], check=True, env=environment)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", OUTSIDE)
@pytest.mark.parametrize("place", ["files", "rows", "graph", "dense", "chain"])
def test_a_path_that_leaves_the_folder_is_refused(
    exported: Path, tmp_path: Path, place: str, name: str
) -> None:
    (tmp_path / "secret").write_text("secret")

    def change(manifest: dict[str, Any]) -> None:
        first = manifest["tables"][0]["parts"][0]
        if place == "files":
            manifest["files"][name] = manifest["files"][first["file"]]
        elif place == "rows":
            first["file"] = name
        elif place == "chain":
            manifest["chain"] = [{"folder": name, "digest": "0" * 64}]
        else:
            manifest[place]["file"] = name

    with pytest.raises(
        FormatError,
        match=r"outside of the checkpoint|not listed in MANIFEST|not a checkpoint's name",
    ):
        hb.ParameterServer(tmp_path / "rows").load("m", forged(exported, tmp_path / "copy", change))
    assert (tmp_path / "secret").read_text() == "secret"


def test_a_table_cannot_name_a_place_for_its_rows(exported: Path, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for entry in manifest["tables"]:
            if entry["name"] == "user":
                entry["name"] = entry["config"]["name"] = "../../../user"
        for lookup in manifest["graph"]["lookups"]:
            lookup["features"] = [
                [f, "../../../user" if table == "user" else table, p]
                for f, table, p in lookup["features"]
            ]

    hb.ParameterServer(tmp_path / "a/b/rows").load(
        "m/../../..", forged(exported, tmp_path / "copy", change)
    )
    written = [path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()]
    assert {path.parts[0] for path in written} == {"a", "copy"}
    assert {path.parts[:3] for path in written if path.parts[0] == "a"} == {("a", "b", "rows")}


def test_nothing_is_unpickled_on_the_way_to_a_score(exported: Path, tmp_path: Path) -> None:
    code = """
import hotbed as hb, onnxruntime, safetensors, pyarrow
hb.InferenceSession, hb.ParameterServer
import pickle, _pickle, numpy
def refused(*arguments, **keywords):
    raise AssertionError("unpickled")
class Refused:
    __init__ = refused
for module in (pickle, _pickle):
    module.load = module.loads = refused
    module.Unpickler = Refused
numpy.load = refused
try:
    pickle.loads(b"")
except AssertionError:
    pass
else:
    raise SystemExit("the trap is open")
exported, rows = arguments
session = hb.InferenceSession(hb.ParameterServer(rows).load("m", exported))
say(session.predict({"user": [1], "item": ["i1"], "genres": ["g1|g2"], "price": [1.0]}))
"""
    (scores,) = COMMANDS.run(code, exported, tmp_path / "rows")
    assert scores.startswith("[")


def test_the_package_has_no_reader_that_runs_what_it_reads() -> None:
    modules = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    calls = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load", "eval", "exec"}
    own_process = {
        "connectors/kafka/client.py",
        "connectors/kafka/process.py",
        "parallel/decoding.py",  # what ranks of one job send each other
        "parallel/ranks.py",  # as torch.distributed, which carries it, pickles objects of ranks
    }  # both ends are of one program
    wrong = []
    words = modules | {call.rpartition(".")[2] for call in calls}
    suspect = re.compile(rf"\b({'|'.join(sorted(words))})\b")
    for path in sorted((ROOT / "src/hotbed").rglob("*.py")):
        text = path.read_text()
        if not suspect.search(text):
            continue
        for node in ast.walk(ast.parse(text)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            wrong += [
                f"{path}:{node.lineno} imports {name}"
                for name in names
                if name.split(".")[0] in modules
                and path.relative_to(ROOT / "src/hotbed").as_posix() not in own_process
            ]
            if isinstance(node, ast.Call) and ast.unparse(node.func) in calls:
                # of yaml_files.py, a SafeLoader
                safe = len(node.args) == 2 and ast.unparse(node.args[1]) == "Loader"
                wrong += [] if safe else [f"{path}:{node.lineno} calls {ast.unparse(node.func)}"]
    assert not wrong, "\n".join(wrong)
    with pytest.raises(ConfigError, match="could not determine a constructor"):
        parse_value("!!python/object/apply:os.getcwd []")


def test_a_published_version_of_a_stranger_is_refused_and_the_one_before_stays(
    exported: Path, tmp_path: Path
) -> None:
    server = hb.ParameterServer()
    served = server.load("m", exported)
    wrong = forged(
        exported, tmp_path / "copy", lambda manifest: manifest["dense"].update(file="../../secret")
    )
    with pytest.raises(PersistError):
        server.load("m", wrong)
    assert server.model("m").digest == served.digest
