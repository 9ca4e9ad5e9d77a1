# SPDX-License-Identifier: Apache-2.0
"""The quality of what was served in a window: by route, version and segment, and differences."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from hotbed.connectors.request_log import SHADOW
from hotbed.metrics.clustered import Clustered, clustered
from hotbed.metrics.metric import Samples
from hotbed.quality.samples import ROUTE, VERSION, codes, list_numbers, user_numbers

REPLAY = "replay"
"""The route of scores that a job gave to logged requests afterwards."""

BASE = "base"
"""The route of scores of a second such job, which the first one is compared with."""

_UNSEEN = (SHADOW, REPLAY, BASE)  # routes of scores that no client got
_BETWEEN = " "  # a version and its digest

METRICS = ("auc", "log_loss", "normalized_entropy", "calibration", "rate", "hit_rate", "ndcg")

Rows = NDArray[np.int64]


@dataclass(frozen=True)
class QualitySettings:
    """How a window is measured.

    Attributes:
        segments: columns whose values are measured apart.
        k: of hit rate and NDCG.
        level: of the intervals.
        baseline: the route that others are compared with.
        most: values of a column that are measured apart, the most frequent ones.
    """

    segments: Sequence[str]
    k: int
    level: float
    baseline: str
    most: int


class Cell(NamedTuple):
    """Which samples are measured together.

    Attributes:
        route: None = all that were answered, which a shadow or a replay was not.
        column: `version` or a segment; None = all of the route.
        value: of the column; None = all values that are too rare to be measured apart.
    """

    route: str | None
    column: str | None = None
    value: str | None = None


class ServedWindow:
    """The samples of a window of event time.

    Args:
        samples: as `joined` returns them.
        settings: how they are measured.
    """

    def __init__(self, samples: pa.Table, settings: QualitySettings) -> None:
        self._settings = settings
        self._score = samples["score"].to_numpy()
        self._label = samples["label"].to_numpy()
        self._list = list_numbers(samples)
        position = samples["position"].to_numpy()
        self._place = codes(samples["request"]) * (int(position.max(initial=0)) + 1) + position
        self._user = user_numbers(samples)
        self._routes = _Values.of(samples[ROUTE])
        self._columns = {VERSION: _versions(samples)}
        for name in settings.segments:
            self._columns[name] = _Values.of(samples[f"segment.{name}"])

    def cells(self) -> dict[Cell, Rows]:
        """Return the samples of each cell by their numbers: all of them, then by route."""
        by_route = dict(self._routes.rows(sorted(self._routes.names)))
        del by_route[None]
        answered = [rows for route, rows in by_route.items() if route not in _UNSEEN]
        every = np.sort(np.concatenate([np.empty(0, np.int64), *answered]))
        cells: dict[Cell, Rows] = {}
        for route, chosen in [(None, every), *by_route.items()]:
            cells[Cell(route)] = chosen
            for name, values in self._columns.items():
                frequent = values.frequent(self._settings.most)
                for value, rows in values.rows(frequent, chosen):
                    cells[Cell(route, name, value)] = rows
        return {cell: rows for cell, rows in cells.items() if len(rows)}

    def measured(self, rows: Rows) -> Clustered:
        """Return the metrics of some samples; those without a score are left out."""
        rows = rows[~np.isnan(self._score[rows])]
        weights = np.ones(len(rows))
        samples = Samples(self._score[rows], self._label[rows], weights, None)
        return clustered(samples, self._user[rows], self._list[rows], self._settings.k)

    def numbers(self, rows: Rows) -> dict[str, Any]:
        """Return how many users, lists and samples there are, and which of them count."""
        scored = rows[~np.isnan(self._score[rows])]
        return {
            "users": len(np.unique(self._user[scored])),
            "lists": len(np.unique(self._list[scored])),
            "samples": len(scored),
            "positives": int(self._label[scored].sum()),
            "without_score": len(rows) - len(scored),
        }

    def paired(self, shadow: Rows, answered: Rows) -> tuple[Clustered, Clustered, int] | None:
        """Return the metrics of a shadow or a replay, and of others for the same candidates.

        The labels are those of the others. None: no candidate has both scores. The number is that
        of the candidates.
        """
        shadow = shadow[~np.isnan(self._score[shadow])]
        answered = answered[~np.isnan(self._score[answered])]
        _, of_shadow, of_answered = np.intersect1d(
            self._place[shadow], self._place[answered], return_indices=True
        )
        num_pairs = len(of_shadow)
        if not num_pairs:
            return None
        answered = answered[of_answered[np.argsort(of_shadow, kind="stable")]]
        shadow = np.sort(shadow[of_shadow])
        parts = []
        for rows in (shadow, answered):
            weights = np.ones(len(rows))
            samples = Samples(self._score[rows], self._label[answered], weights, None)
            users = self._user[answered]
            lists = self._list[answered]
            parts.append(clustered(samples, users, lists, self._settings.k))
        return parts[0], parts[1], num_pairs


@dataclass(frozen=True)
class _Values:
    """The text of each sample in a column, as its number in `names`."""

    names: list[str]
    codes: Rows

    @classmethod
    def of(cls, values: pa.ChunkedArray) -> _Values:
        """Return the values of a column; nulls are empty texts."""
        encoded = pc.fill_null(values, "").combine_chunks().dictionary_encode()
        return cls(encoded.dictionary.to_pylist(), _whole(encoded.indices))

    def frequent(self, most: int) -> list[str]:
        """Return the most frequent names; of equally frequent ones the lower."""
        counts = np.bincount(self.codes, minlength=len(self.names)).tolist()
        order = sorted(range(len(counts)), key=lambda code: (-counts[code], self.names[code]))
        return [self.names[code] for code in order[:most]]

    def rows(
        self, names: Sequence[str], among: Rows | None = None
    ) -> Iterator[tuple[str | None, Rows]]:
        """Yield some names with their samples `among` others, then None with the rest."""
        rest = np.arange(len(self.codes)) if among is None else among
        for name in names:
            is_name = self.codes[rest] == self.names.index(name)
            yield name, rest[is_name]
            rest = rest[~is_name]
        yield None, rest


def _whole(values: pa.Array) -> Rows:
    return np.asarray(values.to_numpy(zero_copy_only=False), np.int64)


def _versions(samples: pa.Table) -> _Values:
    """Return the version of each sample, with its digest if two states share the number."""
    states = _Values.of(pc.binary_join_element_wise(samples[VERSION], samples["digest"], _BETWEEN))
    pairs = [name.rsplit(_BETWEEN, 1) for name in states.names]
    counts = Counter(version for version, _ in pairs)
    names = []
    for version, digest in pairs:
        names.append(version if counts[version] == 1 else f"{version} {digest[:8]}")
    return _Values(names, states.codes)


def measure_window(
    samples: pa.Table, settings: QualitySettings
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return the rows of both tables of a window: quality, and differences."""
    window = ServedWindow(samples, settings)
    cells = window.cells()
    measured = {cell: window.measured(rows) for cell, rows in cells.items()}
    quality = []
    for cell, metrics in measured.items():
        numbers = window.numbers(cells[cell])
        quality.append({**cell._asdict(), **numbers, **_figures(metrics, settings.level)})
    differences = []
    for cell, against, left, right, num_samples in _compared(window, cells, measured, settings):
        differences.append(
            {
                **cell._asdict(),
                "against": against,
                "samples": num_samples[0],
                "against_samples": num_samples[1],
                **_figures(left.minus(right), settings.level),
            }
        )
    return quality, differences


_Comparison = tuple[Cell, str, Clustered, Clustered, tuple[int, int]]


def _compared(
    window: ServedWindow,
    cells: dict[Cell, Rows],
    measured: dict[Cell, Clustered],
    settings: QualitySettings,
) -> Iterator[_Comparison]:
    """Yield what is compared: routes with the baseline, versions with its most used one.

    A shadow is compared with the answers to the same requests, and so is a replay, or else with
    the replay of its base.
    """
    routes = [cell.route for cell in cells if cell.column is None and cell.route is not None]
    answering = [route for route in routes if route not in _UNSEEN]
    baseline = settings.baseline
    if baseline not in answering and answering:
        baseline = max(answering, key=lambda route: len(cells[Cell(route)]))
    usual = _usual_version(cells, baseline)
    for cell, rows in cells.items():
        if cell.route in _UNSEEN:
            route = BASE if cell.route == REPLAY and BASE in routes else None
            other = Cell(route) if cell.column == VERSION else cell._replace(route=route)
            pair = window.paired(rows, cells.get(other, np.empty(0, np.int64)))
            if pair is not None:
                yield cell, route or "answered", pair[0], pair[1], (pair[2], pair[2])
            continue
        against = ""
        if cell.route is not None and cell.route != baseline and cell.column != VERSION:
            other = cell._replace(route=baseline)
            against = baseline
        elif cell.route is None and cell.column == VERSION and cell.value not in (None, usual):
            other = cell._replace(value=usual)
            against = usual
        if against and other in cells:
            num_samples = (len(rows), len(cells[other]))
            yield cell, against, measured[cell], measured[other], num_samples


def _usual_version(cells: dict[Cell, Rows], baseline: str) -> str:
    """Return the version that scored most samples of the baseline."""
    counts = {
        cell.value: len(rows)
        for cell, rows in cells.items()
        if (cell.route, cell.column) == (baseline, VERSION) and cell.value is not None
    }
    return max(counts, key=counts.__getitem__, default="")


def _figures(metrics: Clustered, level: float) -> dict[str, float]:
    """Return each metric with the ends of its interval."""
    figures: dict[str, float] = {}
    for name in METRICS:
        low, high = metrics.interval(name, level)
        figures |= {name: metrics.values[name], f"{name}_low": low, f"{name}_high": high}
    return figures
