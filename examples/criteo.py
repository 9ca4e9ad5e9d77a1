# SPDX-License-Identifier: Apache-2.0
"""Criteo's display advertising log: tab separated, no header, hex hashes, empty missing fields.

python examples/criteo.py PATH/train.txt
"""

from __future__ import annotations

import sys

import hotbed as hb

NUMBERS = [f"I{i}" for i in range(1, 14)]
HASHES = [f"C{i}" for i in range(1, 27)]


def main(path: str) -> None:
    columns: dict[str, str | None] = dict.fromkeys(["label", *NUMBERS], "float64")
    columns |= dict.fromkeys(HASHES, "string")
    log = hb.sources.Csv(path, delimiter="\t", header=False, columns=columns)

    # Counts are missing, negative or huge. Hashes stay as they are: each becomes a 64-bit id with
    # a row of its own.
    counts = [
        hb.transforms.FillMissing(0.0),
        hb.transforms.Clip(low=0.0),
        hb.transforms.Log(),
        hb.transforms.Normalize(),
    ]
    draft = hb.Schema(
        [
            hb.Label("label"),
            *(hb.Dense(name, transforms=counts) for name in NUMBERS),
            *map(hb.Id, HASHES),
        ]
    )
    schema = draft.fit(log.slice(0.0, 0.8))  # means and deviations, of the training range only

    train = hb.Dataset(log.slice(0.0, 0.8), schema, batch_size=256)
    valid = hb.Dataset(log.slice(0.8, 1.0), schema, batch_size=256)
    tables = hb.make_tables(schema, dim=8, rule=hb.RowwiseAdagrad(lr=0.05), admit=hb.MinCount(2))
    network = hb.models.DLRM(schema, tables, interaction="dot")
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), metrics=["auc", "log_loss"])
    history = model.fit(train, valid)

    print({name: round(value, 4) for name, value in history.metrics.items()})
    refused = sum(table.stats["refused"] for table in tables.values())
    print(
        f"{sum(map(len, tables.values())):,} rows; {refused:,} times an id was seen that has none "
        "yet"
    )


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else sys.exit(__doc__)
