# SPDX-License-Identifier: Apache-2.0
"""Generated rows: their distributions, and files of them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hotbed.connectors import Generated, Keys, Parquet, PowerLaw, Source, UniformKeys
from hotbed.connectors.generated import Distribution
from hotbed.errors import ConfigError

pytestmark = pytest.mark.core


def column(source: Source, name: str) -> list[object]:
    return [value for batch, _ in source.read() for value in batch.column(name).to_pylist()]


def drawn(distribution: Distribution, size: int = 10, rows: int = 100_000) -> np.ndarray:
    slots = {"x": Keys(size, first=7)}
    keys = column(Generated(rows, slots=slots, distribution=distribution), "x")
    counts = np.bincount(np.array(keys, np.int64) - 7, minlength=size)
    assert len(counts) == size
    return counts / rows


def test_uniform_keys_are_equally_frequent() -> None:
    np.testing.assert_allclose(drawn(UniformKeys()), np.full(10, 0.1), atol=0.01)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.2, 3.0])
def test_a_power_law_draws_the_integral_of_its_density(alpha: float) -> None:
    edges = np.linspace(1, 11, 100_001)
    density = (edges[:-1] + 5e-5) ** -alpha
    expected = density.reshape(10, -1).sum(1) / density.sum()
    np.testing.assert_allclose(drawn(PowerLaw(alpha)), expected, atol=0.01)


def test_rows_depend_on_the_seed_and_on_nothing_else() -> None:
    slots = {"x": Keys(1000), "y": Keys(1000)}
    first = Generated(100, slots=slots, seed=1)
    assert column(first, "x") == column(Generated(200, slots=slots, seed=1).slice(0, 100), "x")
    assert column(first, "x") != column(Generated(100, slots=slots, seed=2), "x")
    assert column(first, "x") != column(first, "y")


def test_columns_have_their_shapes() -> None:
    slots = {"fixed": Keys(5, count=2), "bag": Keys(5, count=3, varies=True)}
    source = Generated(1000, ["a", "b"], {"p": 1, "q": 3}, slots, dense_type="int32")
    assert source.schema().names == ["a", "b", "p", "q", "fixed", "bag"]
    assert set(column(source, "a")) == {0.0, 1.0}
    assert {len(values) for values in column(source, "q")} == {3}
    assert {type(value) for value in column(source, "p")} == {int}
    assert {len(keys) for keys in column(source, "fixed")} == {2}
    assert {len(keys) for keys in column(source, "bag")} == {1, 2, 3}


def test_generated_rows_are_written_as_parquet(tmp_path: Path) -> None:
    source = Generated(1000, dense={"p": 2}, slots={"x": Keys(9, count=2, varies=True)})
    target = Parquet(tmp_path / "a.parquet")
    assert target.write(source) == 1000
    assert column(target, "x") == column(source, "x")
    assert target.schema().equals(source.schema())
    with pytest.raises(ConfigError, match="one file is written"):
        Parquet(["a", "b"]).write(source)


def test_impossible_draws_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"keys\.size: must be at least 1"):
        Keys(0)
    with pytest.raises(ConfigError, match=r"power_law\.alpha: must be above 0"):
        PowerLaw(-1.2)
    with pytest.raises(ConfigError, match="two columns have one name"):
        Generated(1, slots={"label": Keys(1)})
