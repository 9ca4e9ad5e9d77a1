# SPDX-License-Identifier: Apache-2.0
"""Views and purchases of REES46 as two topics of a real broker, joined by both rules, beside an oracle.

The oracle learns each view at once with the label that it will have within the window, which nobody
can know. All three learn the same views with the same labels, in another order. Prints one JSON
line each: progressive AUC, log loss and calibration.

    python benchmarks/join_rules.py FILE.csv --within 300
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

import hotbed as hb
from hotbed.connectors import Source
from hotbed.testing import Broker

KEYS = ["user_id", "product_id"]
BATCH = 64
SCHEMA = hb.Schema(
    [
        hb.Label("bought"),
        hb.Time("event_time", unit="iso"),
        *(hb.Id(name) for name in ("user_id", "product_id", "category_id", "brand")),
        hb.Dense("price", transforms=[hb.transforms.Log()]),
    ]
)


def topic(broker: Broker, name: str, rows: pa.Table) -> Source:
    """Send rows as Arrow messages of a thousand rows."""
    broker.create(name, 1)
    messages: list[bytes] = []
    for batch in rows.to_batches(max_chunksize=1000):
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        messages.append(bytes(sink.getvalue()))
    broker.produce(name, messages)
    decoder = hb.sources.Arrow()
    return hb.sources.Kafka(broker.servers, name, decoder=decoder, block_rows=1)


def learn(source: Source, num_rows: int) -> dict[str, Any]:
    """Learn a source in its order; return progressive metrics."""
    torch.manual_seed(0)
    tables = hb.make_tables(SCHEMA, dim=8, rule=hb.Adagrad(lr=0.05))
    network = hb.models.DeepFM(SCHEMA, tables, hidden=(32,))
    metrics = {"auc", "log_loss", "calibration"}
    model = hb.RecModel(network, "bce", hb.Adam(lr=1e-3), metrics)
    data = hb.Dataset(source, SCHEMA, BATCH)
    steps = num_rows // BATCH
    history = model.online_train(data, [], max_steps=steps, progress=False)
    whole = {name: round(float(history.metrics[name]), 4) for name in sorted(metrics)}
    return {**whole, "samples": model.counters["samples"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", help="a csv of REES46")
    parser.add_argument("--within", type=float, default=1800, help="seconds")
    options = parser.parse_args()
    log = pa.Table.from_batches([rows for rows, _ in hb.sources.Csv(options.file).read()])
    is_purchase = pc.equal(log["event_type"], "purchase")
    # topics do not end: a window closes when both have passed its end
    end = pc.max(log.filter(is_purchase)["event_time"])
    log = log.filter(pc.less_equal(log["event_time"], end))
    views = log.filter(pc.equal(log["event_type"], "view"))
    purchases = log.filter(pc.equal(log["event_type"], "purchase")).select([*KEYS, "event_time"])
    arguments: dict[str, Any] = {
        "on": KEYS,
        "within": options.within,
        "time": "event_time",
        "unit": "iso",
    }
    arguments["label"] = "bought"
    recorded = hb.sources.Join(hb.sources.Memory(views), hb.sources.Memory(purchases), **arguments)
    labelled = pa.Table.from_batches([rows for rows, _ in recorded.read()])
    oracle = hb.sources.Memory(labelled).sort("event_time")
    share = round(float(pc.mean(labelled["bought"]).as_py()), 5)
    print(json.dumps({"views": labelled.num_rows, "bought": share}), flush=True)
    with Broker() as broker:
        topics = (topic(broker, "views", views), topic(broker, "purchases", purchases))
        rules: dict[str, Source] = {
            "oracle": oracle,
            "wait": hb.sources.Join(*topics, **arguments),
            "as_they_come": hb.sources.Join(*topics, **arguments, rule=hb.sources.AsTheyCome()),
        }
        for name, source in rules.items():
            answer = learn(source, labelled.num_rows)
            print(json.dumps({"rule": name, **answer}), flush=True)


if __name__ == "__main__":
    main()
