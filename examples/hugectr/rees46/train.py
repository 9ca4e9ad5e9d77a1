# SPDX-License-Identifier: Apache-2.0
"""DLRM on REES46 by HugeCTR's low-level API and a JSON file, on what prepare.yaml wrote.

dlrm_template.json is a network for Criteo's columns. `adapt_json` makes the edits that other data
need: slot sizes, the number of dense features, the number of slots.

    python -m hotbed.compat.hugectr.run examples/hugectr/rees46/train.py
"""

import json
from pathlib import Path

import hugectr
from hugectr import inference

PREPARED = Path("runs/hugectr/rees46/prepared")
CONFIG = "runs/hugectr/rees46/dlrm.json"
BATCH = 256

hugectr.adapt_json("examples/hugectr/rees46/dlrm_template.json", PREPARED, CONFIG)

train = json.loads((PREPARED / "train/_metadata.json").read_text())
num_train = sum(file["num_rows"] for file in train["file_stats"])
valid = json.loads((PREPARED / "valid/_metadata.json").read_text())
num_valid = sum(file["num_rows"] for file in valid["file_stats"])

solver = hugectr.solver_parser_helper(
    seed=1,
    max_eval_batches=max(1, num_valid // BATCH),
    batchsize=BATCH,
    batchsize_eval=BATCH,
    vvgpu=[[0]],
    i64_input_key=True,
    repeat_dataset=True,
)
schedule = hugectr.get_learning_rate_scheduler(CONFIG)
session = hugectr.Session(solver, CONFIG)
session.start_data_reading()
steps = 3 * num_train // BATCH
for step in range(1, steps + 1):
    session.set_learning_rate(schedule.get_next())
    session.train()
    if step % 20 == 0:
        print(f"[HUGECTR][INFO] iter: {step}; loss: {session.get_current_loss():.4f}")

session.check_overflow()
session.copy_weights_for_evaluation()
for _ in range(solver.max_eval_batches):
    session.eval()
for name, value in session.get_eval_metrics():
    print(f"[HUGECTR][INFO] iter: {steps}; metrics: {name}: {value:.4f}")
session.download_params_to_files("runs/hugectr/rees46/", steps)

# Inference takes the same file without solver and optimizer, with a sigmoid in place of the loss.
config = json.loads(Path(CONFIG).read_text())
del config["solver"], config["optimizer"]
config["layers"][-1] = {"name": "sigmoid", "type": "Sigmoid", "bottom": "fc5", "top": "sigmoid"}
config["inference"] = {
    "max_batchsize": BATCH,
    "dense_model_file": f"runs/hugectr/rees46/_dense_{steps}.model",
    "sparse_model_file": f"runs/hugectr/rees46/0_sparse_{steps}.model",
    "input_key_type": "I64",
}
serving = CONFIG.replace("dlrm", "dlrm_inference")
Path(serving).write_text(json.dumps(config, indent=2))

server = inference.CreateParameterServer([serving], ["dlrm"], True)
cache = inference.CreateEmbeddingCache(server, 0, True, 0.5, serving, "dlrm", True)
dlrm = inference.InferenceSession(serving, 0, cache)
slots = len(train["cats"])
sizes = config["layers"][0]["slot_size_array"]
offsets = [sum(sizes[:place]) for place in range(slots)]  # what the reader adds to keys
scores = dlrm.predict([0.0] * len(train["conts"]) * 2, offsets * 2, list(range(2 * slots + 1)))
print(f"scores of two samples of unknown values: {scores[0]:.4f}, {scores[1]:.4f}")
