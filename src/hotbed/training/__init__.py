# SPDX-License-Identifier: Apache-2.0
"""The loop that drives everything else: RecModel, callbacks, metrics, the report.

arguments.py      the checks of RecModel's arguments
columns.py        many small dicts as a few arrays, for the state of a checkpoint
described.py      the words for a model
last_step.py      LastStep: the gradients of a training step that was taken
learned_types.py  the types of raw columns that a model learned from
feed.py           the items that a pass reads: of a stream, from the first rank
load.py           load a model from a checkpoint
loop.py           the only loop in Hotbed
make_learner.py   make the learner that the arguments of RecModel ask for
model.py          RecModel: the high-level face of training, after `mindspore_rec.RecModel`
online.py         follow a stream: what `RecModel.online_train` adds to the loop
share_out.py      which features of a fit and which rows of a score each rank reads
sharded_loop.py   the backward pass of a plain PyTorch loop, by grains that ranks share
trained.py        the model that a run trains, as the loop and callbacks know it
run.py            Run: where a training stands, and the callbacks that read and change it
run_settings.py   what decides a run beside its model, which ranks compare
run_state.py      what a checkpoint holds of a run, and how a run resumes from it
writes.py         Writes: how often a run saved or published, and how often that failed
ahead/            the ids of coming batches are mapped to rows while earlier batches train
auto/             ordinary torch models whose embeddings become tables: `hb.auto`
callbacks/        the callbacks of `hb.callbacks`
devices/          which device the dense part computes on, and where the time of its steps goes
device_checks/    whether a device computes the dense part rightly
decisions/        what is decided between steps
gate/             which versions of a stream are published
publishing/       what servers get of a model
step/             the stages of a step, in the order in which the loop calls them
watching/         what a run shows while it learns
"""
