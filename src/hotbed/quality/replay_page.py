# SPDX-License-Identifier: Apache-2.0
"""The page of a replay: the predicted test, and the quality of both sides, as one HTML file."""

from __future__ import annotations

import html
from pathlib import Path

from hotbed.persist.container.store import write_text
from hotbed.pictures.bars import Bar, bars_figure
from hotbed.pictures.charts import Chart, Series, figure
from hotbed.pictures.page import page_of, section, side_by_side
from hotbed.quality.page import newest_tables, over_time
from hotbed.quality.prediction import Figure, Prediction
from hotbed.quality.results import Quality

_COLORS = {"logged": 0, "replay": 1, "base": 2}
_WHOLE = "the time after the warm-up"


def write_replay_page(path: Path, quality: Quality, whole: Quality, prediction: Prediction) -> None:
    """Write the page of a replay."""
    cards = {
        "requests": prediction.lists,
        "users": prediction.users,
        "clicks": prediction.clicks,
        "lists with the same first candidate": f"{prediction.same_first:.0%}",
    }
    limits = "".join(f"<li>{html.escape(limit)}</li>" for limit in prediction.limits)
    pictures = side_by_side([_rates(prediction), _places(prediction)])
    sections = [
        section("What a test on users would have shown", pictures, verdict(prediction)),
        section("What this cannot know", f"<ul>{limits}</ul>"),
        *newest_tables(whole, _WHOLE),
        *over_time(quality),
    ]
    subtitle = f"replay against {prediction.against}"
    write_text(path, page_of("Replay of a request log", subtitle, cards, sections))


def verdict(prediction: Prediction) -> str:
    """Return a sentence on the predicted difference."""
    difference = prediction.difference
    rate = prediction.rates[prediction.against].value
    text = (
        f"Predicted click rate of replay minus {prediction.against}: {difference.value:+.5f} "
        f"({difference.value / rate:+.1%}), interval {difference.low:+.5f} to "
        f"{difference.high:+.5f}."
    )
    if difference.low <= 0 <= difference.high:
        return f"{text} It holds 0: this log cannot tell the two apart."
    if difference.low > 0 or difference.high < 0:
        better = "replay" if difference.value > 0 else prediction.against
        return f"{text} More would have been clicked with {better}."
    return f"{text} Fewer than 20 users have no interval."


def rate_text(rate: Figure) -> str:
    """Return a click rate with its interval."""
    return f"{rate.value:.5f} ({rate.low:.5f} to {rate.high:.5f})"


def _rates(prediction: Prediction) -> str:
    bars = [
        Bar(side, rate.value, rate_text(rate), _COLORS[side])
        for side, rate in prediction.rates.items()
    ]
    return bars_figure("Click rate, with intervals", bars)


def _places(prediction: Prediction) -> str:
    """Return a chart of how often each place is examined."""
    chart = Chart("Examination of places, as found in the log", "place", from_zero=True)
    places = [float(place + 1) for place in range(len(prediction.examination))]
    chart.series.append(Series("examination", places, prediction.examination.tolist(), dots=True))
    return figure(chart)
