# SPDX-License-Identifier: Apache-2.0
"""Real logs through a natural schema each: what comes out is what the file says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import hotbed as hb
from hotbed.data import Batch

pytestmark = pytest.mark.core
t = hb.transforms


def whole(source: hb.sources.Source, *columns: object) -> tuple[Batch, hb.Dataset]:
    dataset = hb.Dataset(source, hb.Schema(columns), 4096)
    return Batch.concat(list(dataset)), dataset


def test_criteo_counts_its_missing_values(shared_data: Path) -> None:
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    file = shared_data / "criteo" / "kaggle_head10001.tsv"
    source = hb.sources.Csv(file, delimiter="\t", header=False, columns=names, quote=None)
    dense = [hb.Dense(name, [t.FillMissing(0), t.Clip(low=0), t.Log()]) for name in names[1:14]]
    batch, dataset = whole(source, hb.Label("label"), *dense, *(hb.Id(name) for name in names[14:]))
    raw = [line.split("\t") for line in file.read_text().splitlines()]
    for place, name in enumerate(names[14:], 14):
        empty = np.array([row[place] == "" for row in raw])
        assert (batch.ids[name].lengths() == ~empty).all()
        assert dataset.encoder.stats.missing.get(name, 0) == empty.sum()
        assert len(np.unique(batch.ids[name].values)) == len({row[place] for row in raw} - {""})
    expected = np.log1p([max(0.0, float(row[2] or 0)) for row in raw])
    assert batch.dense["I2"] == pytest.approx(expected, rel=1e-6)


def test_criteo_variants_share_one_schema(shared_data: Path) -> None:
    schema = [hb.Label("label"), hb.Dense("I3", [t.FillMissing(0)]), hb.Id("C1"), hb.Id("C26")]
    batch, _ = whole(hb.sources.Csv(shared_data / "criteo" / "deepctr_sample_200.csv"), *schema)
    assert batch.num_samples == 200
    names = ["label", *(f"I{i}" for i in range(1, 14)), *(f"C{i}" for i in range(1, 27))]
    for file, delimiter, rows in (
        ("terabyte_day0_1000.tsv", "\t", 1_000),
        ("deeplight_idx_train.csv", ",", 10_000),
    ):
        source = hb.sources.Csv(
            shared_data / "criteo" / file, delimiter=delimiter, header=False, columns=names
        )
        assert whole(source, *schema)[0].num_samples == rows


def test_avazu_keeps_the_64_bits_of_its_ids(shared_data: Path) -> None:
    source = hb.sources.Csv(shared_data / "avazu" / "stream_20141021.csv")
    time = hb.Time("time", unit="iso", column="hour")
    batch, _ = whole(source, hb.Label("click"), time, hb.Id("id"), hb.Id("site_id"), hb.Id("C14"))
    lines = (shared_data / "avazu" / "stream_20141021.csv").read_text().splitlines()[1:]
    ids = np.array([int(line.split(",")[1]) for line in lines], np.uint64)
    assert (batch.ids["id"].values.view(np.uint64) == ids).all()
    assert batch.labels["click"].sum() == sum(line.split(",")[2] == "1" for line in lines)


def test_rees46_reads_utc_times_and_missing_brands(shared_data: Path) -> None:
    source = hb.sources.Csv(shared_data / "rees46" / "2019-Oct.head.csv")
    batch, dataset = whole(
        source,
        hb.Label("bought", column="event_type", positive="purchase"),
        hb.Time("event_time", unit="iso"),
        hb.Id("user_session"),
        hb.Id("brand"),
        hb.Id("category_code", transforms=[t.Split(".")]),
        hb.Dense("price", [t.Log()]),
    )
    assert 0 < batch.labels["bought"].sum() < 1000
    assert dataset.encoder.stats.missing["category_code"] / batch.num_samples == pytest.approx(
        0.33, abs=0.01
    )
    assert dataset.encoder.stats.missing["brand"] / batch.num_samples == pytest.approx(
        0.14, abs=0.01
    )
    assert (np.diff(batch.time) >= 0).all()


def test_mind_histories_are_sequences(shared_data: Path) -> None:
    names = ["impression", "user", "time", "history", "candidates"]
    source = hb.sources.Csv(
        shared_data / "mind" / "behaviors.tsv",
        delimiter="\t",
        header=False,
        columns=names,
        quote=None,
    )
    history = hb.Id("history", transforms=[t.Split(" ")], pooling="none", max_length=10)
    batch, _ = whole(source, hb.Time("time", unit="%m/%d/%Y %I:%M:%S %p"), hb.Id("user"), history)
    rows = [
        line.split("\t")
        for line in (shared_data / "mind" / "behaviors.tsv").read_text().splitlines()
    ]
    assert batch.ids["history"].lengths().tolist() == [min(10, len(row[3].split())) for row in rows]
    last = next(i for i, row in enumerate(rows) if len(row[3].split()) > 10)
    only = hb.Encoder(hb.Schema([hb.Id("history")]))(
        hb.sources.Memory({"history": rows[last][3].split()[-10:]}).table
    )
    assert (
        batch.ids["history"][last : last + 1].values.tolist() == only.ids["history"].values.tolist()
    )


def test_census_has_two_labels(shipped_data: Path) -> None:
    source = hb.sources.Parquet(shipped_data / "census_income_kdd" / "train.parquet")
    income = hb.Label("income", column="income_50k", positive="50000+.")
    married = hb.Label("never_married", column="marital_stat", positive="Never married")
    batch, _ = whole(
        source, income, married, hb.Weight("instance_weight"), hb.Dense("age"), hb.Id("education")
    )
    assert batch.num_samples == 159_618
    assert 0.05 < batch.labels["income"].mean() < 0.08
    assert 0.3 < batch.labels["never_married"].mean() < 0.5
    assert batch.weight.min() >= 0


def test_frappe_ids_pass_as_they_are(shared_data: Path) -> None:
    fields = [
        "user",
        "item",
        "daytime",
        "weekday",
        "isweekend",
        "homework",
        "cost",
        "weather",
        "country",
        "city",
    ]
    source = hb.sources.Csv(shared_data / "frappe_x1r" / "valid.csv")
    batch, _ = whole(source, hb.Label("label"), *(hb.Id(name, table="all") for name in fields))
    raw = np.loadtxt(shared_data / "frappe_x1r" / "valid.csv", np.int64, delimiter=",", skiprows=1)
    assert (np.stack([batch.ids[name].values for name in fields], 1) == raw[:, 1:]).all()
    assert (batch.labels["label"] == raw[:, 0]).all()


@pytest.mark.parametrize(
    ("path", "columns"),
    [
        (
            "movielens_sparrow/testSamples.csv",
            [hb.Label("label"), hb.Id("movieGenre1"), hb.Dense("movieAvgRating")],
        ),
        (
            "taobao_ad/raw_sample_10k.csv",
            [hb.Label("clk"), hb.Time("time_stamp"), hb.Id("user"), hb.Id("pid")],
        ),
        (
            "ml1m_u2999/ratings_early.csv",
            [hb.Label("rating", threshold=4), hb.Time("timestamp"), hb.Id("user_id")],
        ),
        (
            "obd/random_men.csv",
            [hb.Label("click"), hb.Time("timestamp", unit="iso"), hb.Dense("propensity_score")],
        ),
        ("mltag_x1t/train.csv", [hb.Label("label"), hb.Id("user_id"), hb.Id("tag_id")]),
    ],
)
def test_other_logs_are_read_whole(shared_data: Path, path: str, columns: list[object]) -> None:
    batch, dataset = whole(hb.sources.Csv(shared_data / path), *columns)
    assert batch.num_samples == (shared_data / path).read_text().count("\n") - 1
    assert set(np.unique(next(iter(batch.labels.values())))) == {0.0, 1.0}
    assert dataset.skips.total == 0


def test_tab_separated_logs_are_read_whole(shared_data: Path) -> None:
    source = hb.sources.Csv(shared_data / "amazon_grocery" / "train.tsv", delimiter="\t")
    side = hb.sources.Csv(shared_data / "amazon_grocery" / "item_category.tsv", delimiter="\t")
    batch, _ = whole(
        source.join(side, on="item_id"), hb.Time("time"), hb.Id("item_id"), hb.Id("i_category")
    )
    assert batch.num_samples == 121_892
