# SPDX-License-Identifier: Apache-2.0
"""One map of file endings: which source reads a file, for sources, followed folders and drafts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path

import pytest
import yaml

import hotbed as hb
from hotbed import config
from hotbed.connectors import Csv, Follow, Jsonl, Libsvm, Norm, Parquet, Raw
from hotbed.connectors.endings import FILE_KINDS, check_source, source_for
from hotbed.connectors.files import FileSource
from hotbed.errors import ConfigError
from hotbed.job.drafting.draft import draft

pytestmark = pytest.mark.core


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("a.csv", Csv("a.csv")),
        ("a.TXT", Csv("a.TXT")),
        ("a.tsv.gz", Csv("a.tsv.gz", delimiter="\t")),
        ("a.jsonl", Jsonl("a.jsonl")),
        ("a.ndjson.lz4", Jsonl("a.ndjson.lz4")),
        ("a.json", Jsonl("a.json")),
        ("day=1/a.pq", Parquet("day=1/a.pq")),
        ("a.libsvm.zst", Libsvm("a.libsvm.zst")),
        ("a.svm", Libsvm("a.svm")),
        ("a.xls", None),
        ("a.gz", None),
        ("csv", None),
    ],
)
def test_ending_names_the_source(name: str, source: FileSource | None) -> None:
    assert source_for(name) == source


def test_every_kind_of_file_source_has_endings_in_the_map() -> None:
    """A kind that is missing in `FILE_KINDS`, or has no ending, fails here by its name.

    Files of samples have no usual ending, and a name does not tell what is in them.
    """
    kinds = set(config.kinds(FileSource).values())
    assert kinds == {*FILE_KINDS, Norm, Raw}
    assert [kind.__name__ for kind in FILE_KINDS if not kind.endings] == []
    endings = [ending for kind in FILE_KINDS for ending in kind.endings]
    assert len(endings) == len(set(endings))


def test_path_instead_of_a_source_names_the_source_to_give() -> None:
    with pytest.raises(ConfigError, match=r"Give hb\.sources\.Libsvm\('a\.svm\.gz'\)"):
        check_source("a.svm.gz")
    with pytest.raises(ConfigError, match=r"Give hb\.sources\.Csv\('a\.unknown'\)"):
        check_source("a.unknown")


def test_followed_folder_reads_every_ending_of_the_map(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("user,label\n1,0\n")
    (tmp_path / "b.json").write_text('{"user": 2, "label": 1}\n')
    dataset = hb.Dataset(
        Follow(tmp_path), hb.Schema([hb.Label("label"), hb.Id("user")]), 1, prefetch=0
    )
    batches = list(islice(dataset, 2))
    assert [batch.ids["user"].values.tolist() for batch in batches] == [[1], [2]]


def test_draft_of_a_libsvm_file_can_be_encoded(tmp_path: Path) -> None:
    file = tmp_path / "a.svm"
    file.write_text("".join(f"{row % 2} {row % 7 + 1}:0.5 9:{row}\n" for row in range(40)))
    job = yaml.safe_load(draft(str(file)))
    assert job["train"]["source"] == {"kind": "libsvm", "path": str(file)}
    schema = hb.Schema.from_json({"columns": job["schema"]["columns"]})
    batch = next(iter(hb.Dataset(Libsvm(str(file)), schema, 40)))
    assert batch.ids["features"].values[:4].tolist() == [1, 9, 2, 9]
    assert batch.ids["features"].weights[:4].tolist() == [0.5, 0.0, 0.5, 1.0]
