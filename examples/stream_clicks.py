# SPDX-License-Identifier: Apache-2.0
"""Streams that drift: clicks of Avazu and ratings of MovieLens-1M, learned through a broker.

A frozen model is evaluated on the same events. FOLDER holds avazu/stream_20141021.csv and
ml1m_u2999/ratings_early.csv:

    python examples/stream_clicks.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

from stream_kafka import compare

import hotbed as hb

ADS = [
    "C1",
    "banner_pos",
    "site_id",
    "site_domain",
    "site_category",
    "app_id",
    "app_domain",
    "app_category",
    "device_id",
    "device_ip",
    "device_model",
    "device_type",
    "device_conn_type",
    *(f"C{number}" for number in range(14, 22)),
]


def avazu(file: Path) -> None:
    """Clicks on ads within a day, in the order of time; addresses and devices come and go."""
    clicks = hb.Schema(
        [
            hb.Label("click"),
            hb.Time("hour", unit="iso"),
            hb.Id("hour_of_day", column="hour", transforms=[hb.transforms.Extract(r"\s(\d\d):")]),
            *map(hb.Id, ADS),
        ]
    )
    events = hb.sources.Csv(file, columns=dict.fromkeys(["hour", "device_ip"], "string"))
    compare("avazu", events, clicks, "device_ip", rule=hb.Adagrad(lr=0.05), admit=hb.MinCount(2))


def movielens(file: Path) -> None:
    """Ratings of the first months of a site: most users and many films are new each day."""
    ratings = hb.Schema(
        [
            hb.Label("liked", column="rating", threshold=4),
            hb.Time("timestamp", unit="s"),
            hb.Id("user", column="user_id"),
            hb.Id("film", column="item_id"),
        ]
    )
    compare(
        "ml1m",
        hb.sources.Csv(file),
        ratings,
        "user_id",
        rule=hb.Adagrad(lr=0.1),
        evict=hb.Ttl(days=60),
    )


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    examples = {
        folder / "avazu/stream_20141021.csv": avazu,
        folder / "ml1m_u2999/ratings_early.csv": movielens,
    }
    for path, run in examples.items():
        if path.exists():
            run(path)
        else:
            print(f"{path}: not there, so {run.__name__} is skipped")
