# SPDX-License-Identifier: Apache-2.0
"""What README.md and docs/ print is true of this version: blocks of Python run, commands parse,
names are there, jobs are read.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pytest
import served_streams
import simulated_world
import torch
import typer
import yaml

import hotbed as hb
from hotbed.cli import commands as cli
from hotbed.job.file import override
from hotbed.job.run import train
from hotbed.prepare import Preparation, prepare
from hotbed.serving.server.options import (
    LogOptions,
    Options,
    RemoteOptions,
    RowsOptions,
    ServerLimits,
)
from hotbed.training.publishing import versions
from hotbed.yaml_files import parse_value

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
GUIDES = (ROOT / "README.md", *sorted(DOCS.glob("*.md")), *sorted(DOCS.glob("migrate/*.md")))
PAGES = {os.path.relpath(page, DOCS).removeprefix("../"): page for page in GUIDES}
JOB = ROOT / "examples/quickstart.yaml"
TOPIC = {'hb.sources.Kafka("localhost:9092", "clicks")': "topic"}

# What stands in for a broker, a bucket, a server or a loop without end, where a page has one.
STANDS_IN: dict[str, dict[str, str]] = {
    "README.md": TOPIC,
    "training.md": TOPIC | {"epochs=10": "epochs=1"},
    "persist.md": {
        "s3://bucket": "memory://documents",
        "cuda": "cpu",
        'hb.Follower("published/clicks")': "published",
    },
    "devices.md": {"cuda": "cpu"},
    "tiers.md": {"/fast/disk": "."},
    "measure.md": {"/log/ranker": "log", "clicks/*": "outcomes/*", '["country"]': '["segment"]'},
    "replay.md": {"/log/ranker": "log", "clicks/*": "outcomes/*"},
    "serving.md": {'hb.Follower("published")': "published"},
    "watching.md": {
        '["country", "age"], bounds={"age": [18, 30, 50]}': (
            '["userId", "rating"], bounds={"rating": [3, 4]}'
        ),
        'figures["country"]': 'figures["userId"]',
    },
    "serving_rows.md": {
        'hb.ParameterServer.connect("grpc://rows:8002")': 'hb.ParameterServer("rows")'
    },
}
# Asked of real servers in tests/unit/serving.
ELSEWHERE = {"serving_clients.md"}


def blocks(page: str, language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", PAGES[page].read_text(), re.MULTILINE | re.DOTALL
    )


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name: every 150th rating of the shipped ones, and
    small ones.
    """
    folder, shipped = tmp_path_factory.mktemp("reader"), ROOT / "data/ml_latest_small"
    (folder / "data/ml_latest_small").mkdir(parents=True)
    ratings = pl.read_csv(shipped / "ratings.csv").gather_every(150)
    for path in (folder / "data/ml_latest_small/ratings.csv", folder / "ratings.csv"):
        ratings.write_csv(path)
    (folder / "movies.csv").write_bytes((shipped / "movies.csv").read_bytes())
    day = folder / "events/day=1"
    day.mkdir(parents=True)
    pl.DataFrame({"user": [1], "label": [0]}).write_parquet(day / "part-0.parquet")
    pl.DataFrame({"item": [1, 2], "user": [7, 8], "hour": [20, 21]}).write_parquet(
        folder / "day_1.parquet"
    )
    (folder / "raw").mkdir()
    clicks().write_parquet(folder / "raw/day_0.parquet")
    (folder / "day_0.tsv").write_text("0\t1.5\tab\n")
    (folder / "train.libsvm").write_text("1 3:1.0\n")
    (folder / "2019-Oct.csv").write_text(
        "event_time,event_type,product_id,user_id\n2019-10-01 00:00:00 UTC,view,1,2\n"
    )
    with gzip.open(folder / "events.jsonl.gz", "wt") as file:
        file.write('{"user": [1, 2], "label": 0}\n')
    sparse = folder / "0_sparse_10000.model"
    sparse.mkdir()
    np.array([1, 2], np.int64).tofile(sparse / "key")
    np.ones((2, 4), np.float32).tofile(sparse / "emb_vector")
    items()["model"].export(folder / "exported")
    return folder


def clicks() -> pl.DataFrame:
    """The raw rows that docs/migrate/nvtabular.md prepares."""
    rows = np.arange(60)
    price = pl.Series([None if row % 7 == 0 else row / 10 for row in rows.tolist()])
    return pl.DataFrame(
        {
            "user": rows % 9,
            "item": rows % 11,
            "city": [f"city {row % 4}" for row in rows.tolist()],
            "price": price,
            "clicked": (rows % 3 == 0).astype(int),
            "time": rows * 100,
        }
    )


def items() -> dict[str, Any]:
    """The model that docs/serving.md asks, of items for a user at an hour, and its stream."""
    schema = hb.Schema([hb.Label("liked"), hb.Id("item"), hb.Id("user"), hb.Id("hour")])
    model = hb.RecModel(
        hb.models.LR(schema, hb.make_tables(schema, dim=1)), "bce", hb.Adam(lr=1e-3)
    )
    rows = {"liked": [0, 1], "item": [1, 2], "user": [7, 7], "hour": [20, 21]}
    model.fit(hb.Dataset(hb.sources.Memory(rows), schema), progress=False)
    return {"model": model, "clicks": hb.Dataset(hb.testing.FakeStream(rows, ends=True), schema)}


def loader(dataset: hb.Dataset) -> list[tuple[torch.Tensor, ...]]:
    """The batches of a data set as the tuples that a loop of PyTorch takes."""
    batches = [batch.map_arrays(torch.from_numpy) for batch in dataset]
    return [(b.ids["user"].values, b.ids["movie"].values, b.labels["liked"]) for b in batches]


def names(page: str) -> dict[str, Any]:
    """What a page takes as given, made anew: data, a model that was trained, a stream."""
    events = (
        hb.sources.Csv("ratings.csv")
        .join(hb.sources.Csv("movies.csv"), on="movieId")
        .sort("timestamp")
    )
    labels = [hb.Label("liked", column="rating", threshold=4)]
    if page == "models.md":
        labels = [
            hb.Label(name, column="rating", threshold=4) for name in ("income", "never_married")
        ]
    schema = hb.Schema(
        [
            *labels,
            hb.Time("timestamp", unit="s"),
            hb.Id("user", column="userId"),
            hb.Id("movie", column="movieId"),
        ]
    )
    train, test = (
        hb.Dataset(events.slice(*part), schema, batch_size=64) for part in ((0.0, 0.2), (0.2, 0.3))
    )
    tables = hb.make_tables(schema, dim=4)
    network = hb.models.DNN(schema, tables, hidden=[4])
    optimizer = torch.optim.Adam(hb.dense_parameters(network))
    model = hb.RecModel(network, "bce", optimizer, metrics=["auc"])
    rows = pa.Table.from_batches([batch for batch, _ in events.slice(0, 40).read()])
    topic = hb.testing.FakeStream(rows, ends=True)
    return {
        "hb": hb,
        "np": np,
        "pa": pa,
        "torch": torch,
        "events": events,
        "schema": schema,
        "train": train,
        "valid": test,
        "test": test,
        "tables": tables,
        "network": network,
        "model": model,
        "optimizer": optimizer,
        "topic": topic,
        "batch": next(iter(train)).map_arrays(torch.from_numpy),
        "views": events,
        "purchases": events,
        "clicks": hb.Dataset(topic, schema, batch_size=16),
        "dataset": hb.Dataset(topic, schema, batch_size=16),
    }


def before(page: str, given: dict[str, Any]) -> None:
    """What the reader of a page has done already."""
    if page in ("format.md", "persist.md", "watching.md"):
        given["model"].fit(given["train"], progress=False)
        given["model"].save(
            {"format.md": "model", "persist.md": "old", "watching.md": "runs/yesterday"}[page]
        )
    if page == "auto.md":
        given["loader"] = loader(given["train"])
    if page == "persist.md":
        given |= {"MyNetwork": lambda: names(page)["network"], "published": []}
    if page == "serving.md":
        given |= {"published": [], **items()}
    if page == "measure.md":
        stream = served_streams.drawn(100)
        served_streams.write(Path(), stream, stream.served(stream.versions()))
    if page == "replay.md":
        world = simulated_world.World.drawn()
        simulated_world.write_world(Path(), world.served(world.requests(100, seed=0)))
        Path("other.yaml").write_text(
            json.dumps(simulated_world.job("item", Path("own")).to_json())
        )
    if page == "prepare.md":
        Path("prepare.yaml").write_text(blocks(page, "yaml")[0])


@pytest.mark.parametrize(
    "page", [page for page in PAGES if blocks(page, "python") and page not in ELSEWHERE]
)
def test_python_on_a_page_runs(
    page: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in home.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    # tracing it takes seconds; tests of publishing do
    monkeypatch.setattr(versions, "_graph", lambda run: None)
    given = names(page)
    before(page, given)
    code = blocks(page, "python")
    for there, here in STANDS_IN.get(page, {}).items():
        assert any(there in block for block in code), f"{page} has no {there} any more"
        code = [block.replace(there, here) for block in code]
    for number, block in enumerate(code, 1):
        exec(compile(block, f"{page}, block {number}", "exec"), given)


def test_measures_on_the_page_are_read(tmp_path: Path) -> None:
    for number, text in enumerate(blocks("measure.md", "yaml")):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text)
        assert hb.ServingQuality.read(file).samples.on == ("request_id", "item")


def commands(page: str) -> Iterator[list[str]]:
    """Every `hotbed …` of the page's blocks and indented lines, split as a shell splits it."""
    for line in re.findall(r"^(?:    )?(hotbed .*)$", PAGES[page].read_text(), re.MULTILINE):
        for command in line.split("&&"):
            yield shlex.split(command.partition(" > ")[0], comments=True)[1:]


@pytest.mark.parametrize("page", [page for page in PAGES if list(commands(page))])
def test_commands_on_a_page_parse(page: str) -> None:
    verbs: Any = typer.main.get_command(cli.app).commands
    for verb, *arguments in commands(page):
        given = verbs[verb].make_context(verb, arguments).params
        if verb == "prepare":
            keys = (assignment.partition("=") for assignment in given["assignments"] or ())
            spec = parse_value(blocks("prepare.md", "yaml")[0])
            assigned = {key: parse_value(value) for key, _, value in keys}
            Preparation.from_json(override(spec, assigned))
        elif "job_file" in given or str(given.get("what", "")).endswith(".yaml"):
            keys = (assignment.partition("=") for assignment in given["assignments"] or ())
            hb.Job.read(JOB, {key: parse_value(value) for key, _, value in keys})


@pytest.mark.parametrize("page", PAGES)
def test_names_on_a_page_are_there(page: str) -> None:
    missing = []
    for name in set(re.findall(r"\bhb\.([A-Za-z_]\w*(?:\.\w+)*)", PAGES[page].read_text())):
        found: Any = hb
        for part in name.split("."):
            found = getattr(found, part, None)
        missing += [name] if found is None else []
    assert not missing


def test_keys_of_a_job_are_those_of_its_page() -> None:
    rows = re.findall(
        r"^\| (`[^|]*) \|",
        PAGES["jobs.md"].read_text().split("## Keys")[1].split("## Commands")[0],
        re.MULTILINE,
    )
    assert sorted(key for row in rows for key in re.findall(r"`(\w+)`", row)) == sorted(
        one.name for one in fields(hb.Job)
    )
    for block in blocks("jobs.md", "yaml"):
        hb.Job.read(JOB, yaml.safe_load(block))


def test_keys_of_a_preparation_are_those_of_its_page() -> None:
    table = PAGES["prepare.md"].read_text().split("## Keys")[1].split("## What it writes")[0]
    keys = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(keys) == sorted(one.name for one in fields(Preparation))


def test_job_of_a_preparations_page_runs(
    home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in home.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    spec, job = (parse_value(block) for block in blocks("prepare.md", "yaml"))
    prepare(Preparation.from_json(spec))
    train(hb.Job.from_json(job))


@pytest.mark.parametrize("page", ["prepare_rows.md", "migrate/nvtabular.md"])
def test_blocks_of_preparations_run(
    page: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for entry in home.iterdir():
        (tmp_path / entry.name).symlink_to(entry)
    monkeypatch.chdir(tmp_path)
    whole, *parts = (parse_value(block) for block in blocks(page, "yaml"))
    columns = whole["schema"]["columns"]
    for number, part in enumerate([{}, *parts]):  # each part on top of the whole
        if isinstance(part, list):
            part = {"schema": {"columns": [*columns, *part]}}
        spec = whole | part | {"output": f"block {number}"}
        assert prepare(Preparation.from_json(spec)).counts["train"] > 0


def test_operators_of_nvtabular_are_on_its_page() -> None:
    operators = """
        AddMetadata AddProperties AddTags Bucketize Categorify Clip ColumnSimilarity DataStats
        DifferenceLag DropLowCardinality Dropna FillMedian FillMissing Filter Groupby HashBucket
        HashedCross JoinExternal JoinGroupby LambdaOp ListSlice LogOp Normalize NormalizeMinMax
        Operator ReduceDtypeSize Rename StatOperator TagAsItemFeatures TagAsItemID
        TagAsUserFeatures TagAsUserID TargetEncoding ValueCount get_embedding_sizes
    """
    rows = re.findall(r"^\| (`[^|]*) \|", PAGES["migrate/nvtabular.md"].read_text(), re.MULTILINE)
    named = set(re.findall(r"`(\w+)", " ".join(rows)))
    assert set(operators.split()) - named == set()


def test_keys_of_the_servers_are_those_of_their_pages() -> None:
    given = {
        "serve": {"host", "port", "grpc_port", "token_file"},
        "parameter-server": {"host", "port", "token_file", "rows"},
    }
    kinds = {
        "serve": (Options, ServerLimits, RemoteOptions, LogOptions),
        "parameter-server": (RowsOptions,),
    }
    pages = ("serving_server.md", "serving_rows.md", "request_log.md")
    tables = re.findall(
        r"^\| key(?: of `hotbed ([\w-]+)`)? \|.*\n((?:\|.*\n)+)",
        "".join(PAGES[page].read_text() for page in pages),
        re.MULTILINE,
    )
    for verb, options in kinds.items():
        rows = [
            row.split("|")[1]
            for of, table in tables
            if (of or "serve") == verb
            for row in table.splitlines()
        ]
        named = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
        assert named == {one.name for kind in options for one in fields(kind)} - given[verb]


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "benchmarks/" in PAGES[page].read_text()]
)
def test_benchmarks_on_a_page_have_their_options(page: str) -> None:
    for script, options in re.findall(
        r"(benchmarks/\w+\.py)((?: -[^`|#\n]*)?)", PAGES[page].read_text()
    ):
        source = (ROOT / script).read_text()
        assert [
            option for option in re.findall(r"--[\w-]+", options) if f'"{option}"' not in source
        ] == []


def test_every_page_is_linked_from_another() -> None:
    pages = {page.resolve() for page in [*PAGES.values(), *(ROOT / "docs/design").glob("*.md")]}
    links = {
        (page.parent / target).resolve()
        for page in pages
        for target in re.findall(r"\]\(([^)#\s]+\.md)", page.read_text())
        if (page.parent / target).resolve() != page
    }
    assert sorted(page.name for page in pages - links) == ["README.md"]
