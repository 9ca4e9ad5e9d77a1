# SPDX-License-Identifier: Apache-2.0
"""DLRM with click histories on MIND by HugeCTR's Python API, on what prepare.yaml wrote.

A news and the news clicked before are two slots of one embedding, so they share their rows: the
reader adds no offsets, because it gets no `slot_size_array`.

    python -m hotbed.compat.hugectr.run examples/hugectr/mind/train.py
"""

import json
from pathlib import Path

import hugectr

PREPARED = Path("runs/hugectr/mind/prepared")
MODEL = "runs/hugectr/mind/dlrm"
BATCH = 512
HISTORY = 20

train = json.loads((PREPARED / "train/_metadata.json").read_text())
valid = json.loads((PREPARED / "valid/_metadata.json").read_text())
num_train = sum(file["num_rows"] for file in train["file_stats"])
num_valid = sum(file["num_rows"] for file in valid["file_stats"])

solver = hugectr.CreateSolver(
    model_name="dlrm",
    batchsize=BATCH,
    batchsize_eval=BATCH,
    max_eval_batches=max(1, num_valid // BATCH),
    lr=0.001,
    vvgpu=[[0]],
    repeat_dataset=True,
    i64_input_key=True,
    metrics_spec={hugectr.MetricsType.AUC: 1.0},
)
reader = hugectr.DataReaderParams(
    data_reader_type=hugectr.DataReaderType_t.Parquet,
    source=[str(PREPARED / "train/_file_list.txt")],
    eval_source=str(PREPARED / "valid/_file_list.txt"),
    check_type=hugectr.Check_t.Non,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Local
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=3,
        dense_name="dense",
        data_reader_sparse_param_array=[
            hugectr.DataReaderSparseParam("news", [1, HISTORY], False, 2),
            hugectr.DataReaderSparseParam("category", 1, True, 1),
            hugectr.DataReaderSparseParam("subcategory", 1, True, 1),
            hugectr.DataReaderSparseParam("hour", 1, True, 1),
        ],
    )
)
for name in ("news", "category", "subcategory", "hour"):
    model.add(
        hugectr.SparseEmbedding(
            embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
            workspace_size_per_gpu_in_mb=25,
            embedding_vec_size=16,
            combiner="mean",
            sparse_embedding_name=f"{name}_embedding",
            bottom_name=name,
            optimizer=optimizer,
        )
    )


def dense(layer, bottoms, top, **settings):
    """Add a dense layer."""
    model.add(hugectr.DenseLayer(getattr(hugectr.Layer_t, layer), bottoms, [top], **settings))


dense("Reshape", ["news_embedding"], "news_flat", leading_dim=2 * 16)
dense("Reshape", ["category_embedding"], "category_flat", leading_dim=16)
dense("Reshape", ["subcategory_embedding"], "subcategory_flat", leading_dim=16)
dense("Reshape", ["hour_embedding"], "hour_flat", leading_dim=16)
flat = ["news_flat", "category_flat", "subcategory_flat", "hour_flat"]
dense("Concat", flat, "flat")
dense("Reshape", ["flat"], "embeddings", leading_dim=16, time_step=5)
dense("InnerProduct", ["dense"], "fc1", num_output=32)
dense("ReLU", ["fc1"], "relu1")
dense("InnerProduct", ["relu1"], "fc2", num_output=16)
dense("ReLU", ["fc2"], "bottom")
dense("Interaction", ["bottom", "embeddings"], "products")
dense("InnerProduct", ["products"], "fc3", num_output=64)
dense("ReLU", ["fc3"], "relu3")
dense("InnerProduct", ["relu3"], "fc4", num_output=32)
dense("ReLU", ["fc4"], "relu4")
dense("InnerProduct", ["relu4"], "logit", num_output=1)
dense("BinaryCrossEntropyLoss", ["logit", "label"], "loss")

model.compile()
model.summary()
steps = num_train // BATCH
model.fit(max_iter=steps, display=50, eval_interval=steps - 1, snapshot=10_000_000)
model.graph_to_json(f"{MODEL}.json")
model.save_params_to_files(MODEL, steps)
