# SPDX-License-Identifier: Apache-2.0
"""Several labels at once, by a mixture of experts: income and marital status in a census sample."""

from __future__ import annotations

import pyarrow as pa
import torch

import hotbed as hb

PATH = "data/census_income_kdd/train.parquet"
AMOUNTS = ["wage_per_hour", "capital_gains", "capital_losses", "stock_dividends"]
LABELS = ["income_50k", "marital_stat"]
ID_TYPES = (pa.types.is_integer, pa.types.is_string, pa.types.is_large_string)


def main() -> None:
    people = hb.sources.Parquet(PATH)
    inputs = [field for field in people.schema() if field.name not in (*LABELS, "instance_weight")]
    columns: list[hb.Label | hb.Dense | hb.Id] = [
        hb.Label("income", column="income_50k", positive="50000+."),
        hb.Label("never_married", column="marital_stat", positive="Never married"),
    ]
    for field in inputs:
        if field.name in AMOUNTS:
            columns.append(
                hb.Dense(field.name, transforms=[hb.transforms.Log(), hb.transforms.Normalize()])
            )
        elif any(is_type(field.type) for is_type in ID_TYPES):
            # codes and texts; age in years is a good id, too
            columns.append(hb.Id(field.name))
    schema = hb.Schema(columns).fit(people.slice(0.0, 0.8))

    torch.manual_seed(0)
    tables = hb.make_tables(schema, dim=4, rule=hb.Adagrad(lr=0.05))
    network = hb.models.MMoE(schema, tables, num_experts=4, expert_hidden=[64], tower_hidden=[16])
    losses = hb.losses.MultiTask({"income": hb.losses.BCE(), "never_married": hb.losses.BCE()})
    model = hb.RecModel(network, losses, hb.Adam(lr=2e-3), metrics=["auc"])

    train = hb.Dataset(people.slice(0.0, 0.8), schema, batch_size=1024)
    valid = hb.Dataset(people.slice(0.8, 1.0), schema, batch_size=4096)
    history = model.fit(train, valid)
    print(
        {name: round(value, 4) for name, value in history.metrics.items() if name.endswith("auc")}
    )


if __name__ == "__main__":
    main()
