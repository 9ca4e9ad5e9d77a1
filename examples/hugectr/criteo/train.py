# SPDX-License-Identifier: Apache-2.0
"""DCN on Criteo by HugeCTR's high-level Python API, on what prepare.yaml wrote.

python -m hotbed.compat.hugectr.run examples/hugectr/criteo/train.py
"""

import json
from pathlib import Path

import hugectr
from hugectr.inference import CreateInferenceSession, InferenceParams

PREPARED = Path("runs/hugectr/criteo/prepared")
MODEL = "runs/hugectr/criteo/dcn"
BATCH = 256

train = json.loads((PREPARED / "train/_metadata.json").read_text())
valid = json.loads((PREPARED / "valid/_metadata.json").read_text())
slots = [train["sizes"][column["col_name"]] for column in train["cats"]]
num_train = sum(file["num_rows"] for file in train["file_stats"])
num_valid = sum(file["num_rows"] for file in valid["file_stats"])

solver = hugectr.CreateSolver(
    model_name="dcn",
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
    slot_size_array=slots,
)
optimizer = hugectr.CreateOptimizer(
    optimizer_type=hugectr.Optimizer_t.Adam, update_type=hugectr.Update_t.Local
)
model = hugectr.Model(solver, reader, optimizer)
model.add(
    hugectr.Input(
        label_dim=1,
        label_name="label",
        dense_dim=13,
        dense_name="dense",
        data_reader_sparse_param_array=[hugectr.DataReaderSparseParam("data1", 1, True, 26)],
    )
)
model.add(
    hugectr.SparseEmbedding(
        embedding_type=hugectr.Embedding_t.DistributedSlotSparseEmbeddingHash,
        workspace_size_per_gpu_in_mb=25,
        embedding_vec_size=16,
        combiner="sum",
        sparse_embedding_name="sparse_embedding1",
        bottom_name="data1",
        optimizer=optimizer,
    )
)


def dense(layer, bottoms, top, **settings):
    """Add a dense layer."""
    model.add(hugectr.DenseLayer(getattr(hugectr.Layer_t, layer), bottoms, [top], **settings))


dense("Reshape", ["sparse_embedding1"], "reshape1", leading_dim=26 * 16)
dense("Concat", ["reshape1", "dense"], "features")
dense("MultiCross", ["features"], "cross", num_layers=3)
dense("InnerProduct", ["features"], "fc1", num_output=256)
dense("ReLU", ["fc1"], "relu1")
dense("Dropout", ["relu1"], "dropout1", dropout_rate=0.5)
dense("InnerProduct", ["dropout1"], "fc2", num_output=256)
dense("ReLU", ["fc2"], "relu2")
dense("Dropout", ["relu2"], "dropout2", dropout_rate=0.5)
dense("Concat", ["dropout2", "cross"], "joined")
dense("InnerProduct", ["joined"], "logit", num_output=1)
dense("BinaryCrossEntropyLoss", ["logit", "label"], "loss")

model.compile()
model.summary()
steps = 2 * num_train // BATCH
model.fit(max_iter=steps, display=20, eval_interval=steps - 1, snapshot=10_000_000)
model.graph_to_json(f"{MODEL}.json")
model.save_params_to_files(MODEL, steps)

# HugeCTR's inference on the files that the run left.
session = CreateInferenceSession(
    f"{MODEL}.json",
    InferenceParams(
        model_name="dcn",
        max_batchsize=BATCH,
        hit_rate_threshold=1.0,
        dense_model_file=f"{MODEL}_dense_{steps}.model",
        sparse_model_files=[f"{MODEL}0_sparse_{steps}.model"],
        device_id=0,
        use_gpu_embedding_cache=True,
        cache_size_percentage=1.0,
        i64_input_key=True,
    ),
)
predictions = session.predict(
    max(1, num_valid // BATCH),
    str(PREPARED / "valid/_file_list.txt"),
    hugectr.DataReaderType_t.Parquet,
    hugectr.Check_t.Non,
    slots,
)
print(f"mean of {len(predictions)} predictions: {sum(predictions) / len(predictions):.4f}")
