# SPDX-License-Identifier: Apache-2.0
"""Down-sampling leaves out negatives only, and its two corrections give back the probability."""

from __future__ import annotations

import numpy as np
import pytest

from hotbed.embedding.hashing import mix64
from hotbed.errors import ConfigError
from hotbed.prepare.sampling.down_sample import DownSample

pytestmark = pytest.mark.core

ROWS = 400_000


@pytest.fixture(scope="module")
def labels() -> np.ndarray:
    """One row in 50 is positive."""
    return (np.arange(ROWS) % 50 == 0).astype(np.float32)


@pytest.mark.parametrize("keep", [0.1, 0.5, 1.0])
def test_positives_stay_and_a_share_of_negatives(labels: np.ndarray, keep: float) -> None:
    is_kept = DownSample("clicked", keep).kept_rows(labels, mix64(np.arange(ROWS)))
    assert is_kept[labels == 1].all()
    # five standard deviations of a share of 392,000
    assert is_kept[labels == 0].mean() == pytest.approx(keep, abs=0.004)


def test_weights_give_back_the_probability_of_all_rows(labels: np.ndarray) -> None:
    sample = DownSample("clicked", 0.1, "weight")
    rest = labels[sample.kept_rows(labels, mix64(np.arange(ROWS)))]
    assert np.average(rest, weights=sample.weights(rest)) == pytest.approx(0.02, rel=0.02)
    assert set(sample.weights(rest).tolist()) == {1.0, 10.0}


def test_the_formula_gives_back_the_probability_of_all_rows(labels: np.ndarray) -> None:
    sample = DownSample("clicked", 0.1)
    q = labels[sample.kept_rows(labels, mix64(np.arange(ROWS)))].mean()
    assert q > 0.15
    assert q / (q + (1 - q) / sample.keep) == pytest.approx(0.02, rel=0.02)


@pytest.mark.parametrize("keep", [0, 1.5, float("nan")])
def test_a_wrong_share_is_an_error(keep: float) -> None:
    with pytest.raises(ConfigError, match=r"down_sample\.keep: must be a finite number > 0"):
        DownSample("clicked", keep)
