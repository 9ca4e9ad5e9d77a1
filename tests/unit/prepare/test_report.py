# SPDX-License-Identifier: Apache-2.0
"""Profiles: however the rows are cut, they count what NumPy counts; and the page that shows them."""

from __future__ import annotations

import json
import pickle
import re
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch absent")

import hotbed as hb
from hotbed.prepare.report import Profile, write_report
from hotbed.prepare.report.distinct import ERROR, FEW, Distinct
from hotbed.prepare.report.timeline import Timeline

DAY = 86_400_000_000


@pytest.mark.parametrize("num_values", [1, 1000, FEW, FEW + 1, 20_000, 300_000])
@pytest.mark.parametrize("kind", ["integers", "texts", "numbers"])
def test_number_of_different_values_is_right_within_the_stated_error(
    num_values: int, kind: str
) -> None:
    rng = np.random.default_rng(num_values)
    numbers = rng.permutation(np.tile(np.arange(num_values), 2)) * 7 - 100
    values = {
        "integers": pa.array(numbers),
        "texts": pa.array(numbers).cast(pa.string()),
        "numbers": pa.array(numbers / 8),
    }[kind]
    whole = Distinct()
    parts = []
    for begin, end in pairwise([0, 100, len(values) // 2, len(values)]):
        part = Distinct()
        for row in range(begin, end, 50_000):
            part.add(values.slice(row, min(50_000, end - row)))
        parts.append(part)
        whole.merge(pickle.loads(pickle.dumps(part)))
    backwards = Distinct()
    for part in parts[::-1]:
        backwards.merge(part)
    assert backwards.count() == whole.count()
    assert whole.is_exact == (num_values <= FEW)
    if whole.is_exact:
        assert whole.count() == num_values
    assert abs(whole.count() - num_values) <= 4 * ERROR * num_values


@given(
    times=st.lists(st.integers(-(10**16), 4 * 10**16), max_size=40),
    cuts=st.lists(st.integers(0, 40), max_size=4),
    most=st.integers(1, 10),
)
def test_timelines_have_the_narrowest_bins_that_suffice_however_the_rows_are_cut(
    times: list[int], cuts: list[int], most: int
) -> None:
    whole = Timeline(1, most)
    merged = Timeline(1, most)
    all_times = np.array(times, np.int64)
    whole.add(all_times, np.ones((len(times), 1)))
    bounds = sorted({0, len(times), *(min(cut, len(times)) for cut in cuts)})
    for begin, end in pairwise(bounds):
        part = Timeline(1, most)
        part.add(all_times[begin:end], np.ones((end - begin, 1)))
        merged.merge(part)
    assert merged.unit == whole.unit
    middles, sums = merged.sums()
    right_middles, right_sums = whole.sums()
    assert middles.tolist() == right_middles.tolist()
    assert sums.tolist() == right_sums.tolist()
    assert sums.sum() == len(times)


def prepared_rows() -> tuple[hb.Schema, list[tuple[str, pa.RecordBatch]]]:
    """Return a fitted schema, and rows of two parts."""
    rng = np.random.default_rng(0)
    num_rows = 4000
    price = rng.lognormal(size=num_rows)
    price[::7] = np.nan
    rows = pa.record_batch(
        {
            "clicked": (rng.random(num_rows) < 0.2).astype(np.int64),
            "at": np.sort(rng.integers(1_500_000_000, 1_501_000_000, num_rows)),
            "city": pa.array(
                [None if n % 5 == 0 else f"<city {min(n % 30, 12)}>" for n in range(num_rows)]
            ),
            "price": pa.array(price),
            "tags": pa.array([["a", "b"][: n % 3] for n in range(num_rows)]),
        }
    )
    schema = hb.Schema(
        [
            hb.Label("clicked"),
            hb.Time("at"),
            hb.Id("city", transforms=[hb.transforms.Map(min_count=150)]),
            hb.Id("tags"),
            hb.Dense("price", [hb.transforms.FillMissing(0.0), hb.transforms.Log()]),
        ]
    ).fit(hb.sources.Memory(rows.slice(0, 3000)))
    parts = [("train", rows.slice(begin, 500)) for begin in range(0, 3000, 500)]
    return schema, [*parts, ("valid", rows.slice(3000))]


def profile_of(schema: hb.Schema, parts: list[tuple[str, pa.RecordBatch]]) -> Profile:
    profile = Profile(schema)
    encode = hb.Encoder(schema)
    for name, rows in parts:
        one = Profile(schema)
        one.add(name, rows, encode(rows))
        profile.merge(pickle.loads(pickle.dumps(one)))
    return profile


def test_profile_counts_rows_labels_and_missing_values() -> None:
    schema, parts = prepared_rows()
    profile = profile_of(schema, parts)
    table = pa.Table.from_batches([rows for _, rows in parts])
    train = table.slice(0, 3000)
    assert {name: part.rows for name, part in profile.parts.items()} == {
        "train": 3000,
        "valid": 1000,
    }
    assert profile.parts["train"].positives == {"clicked": sum(train["clicked"].to_pylist())}
    city = profile.columns["city"]
    assert (city.values, city.missing, city.distinct.count()) == (4000, 800, 10)
    price = profile.columns["price"]
    numbers = np.array(table["price"])
    assert price.missing == np.isnan(numbers).sum()
    assert price.low == np.nanmin(numbers)
    assert price.high == np.nanmax(numbers)
    assert price.mean == pytest.approx(np.nanmean(numbers), rel=1e-12)
    tags = profile.columns["tags"]
    assert (tags.values, tags.missing, tags.distinct.count()) == (4000 + 1333, 1334, 2)
    counts = train["city"].value_counts().to_pylist()
    rare = sum(item["counts"] for item in counts if item["values"] and item["counts"] < 150)
    assert rare == 900
    assert profile.parts["train"].ids["city"] == (2400, rare)


def charts_of(page: str) -> dict[str, Any]:
    titles = re.findall(r'data-chart="(.*?)"><figcaption>(.*?)</figcaption>', page)
    return {unescape(title): json.loads(unescape(chart)) for chart, title in titles}


def test_page_shows_parts_columns_and_labels_and_fetches_nothing(tmp_path: Path) -> None:
    schema, parts = prepared_rows()
    profile = profile_of(schema, parts)
    write_report(tmp_path / "report.html", profile, schema, about={"source": "a <file>"})
    page = (tmp_path / "report.html").read_text()
    assert not re.findall(r"(?:src|href)=|https?://|@import|url\(", page)
    assert "a &lt;file&gt;" in page
    charts = charts_of(page)
    assert list(charts) == ["Rows per hour", "Share of positives, clicked", "price"]
    rows = {line["name"]: line for line in charts["Rows per hour"]["series"]}
    assert sum(rows["training"]["y"]) == 3000
    assert sum(rows["validation"]["y"]) == 1000
    shares = {line["name"]: line for line in charts["Share of positives, clicked"]["series"]}
    assert 80 < len(shares["training"]["x"]) <= 100
    captions = re.findall(r"<figcaption>(.*?)</figcaption>", page)
    assert "Share of missing values" in captions
    assert "Unknown ids, validation" in captions
    assert "map (vocabulary &lt;city 12&gt;, min_count 150)" in page
    write_report(tmp_path / "again.html", profile, schema, about={"source": "a <file>"})
    assert (tmp_path / "again.html").read_text() == page


def test_page_without_times_draws_the_order_of_the_rows(tmp_path: Path) -> None:
    rows = pa.record_batch({"rating": np.arange(20_000) / 1000, "user": np.arange(20_000) % 7})
    schema = hb.Schema([hb.Label("rating"), hb.Id("user")])
    profile = profile_of(schema, [("train", rows)])
    write_report(tmp_path / "report.html", profile, schema)
    charts = charts_of((tmp_path / "report.html").read_text())
    (line,) = charts["Mean rating, in the order of the rows"]["series"]
    assert line["x"] == [4096, 8192, 12_288, 16_384, 20_000]
    assert line["y"] == pytest.approx([2.0475, 6.1435, 10.2395, 14.3355, 18.1915])
