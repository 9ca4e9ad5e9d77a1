# SPDX-License-Identifier: Apache-2.0
"""The stages of a step, in the order in which the loop calls them.

agreement.py      what ranks compare before and at each step
example.py        an item of a dataset as the arguments of a network
compared.py       settings of a program as plain values, which ranks compare
batch_weights.py  weights of ids that a batch brings along, and that learn
criterion.py      the loss function of a model, checked against labels and outputs
fetcher.py        Fetcher: tables on a disk begin to read the rows of batches that come later
division.py       Division: in how many parts a step computes its batch, and on which processes
grains.py         Grains: a pass for each grain of a batch, and what joins what they leave
learner.py        StepLearner: forward, backward and update
map_stage.py      MapStage: decides how far ids are mapped, and lets a thread map them
network.py        what the loop asks of a network: which ids it looks up, and how it is called
one_pass.py       which models are scored by the forward pass that learns
passes.py         Passes: how a batch goes through the network; NetworkPass, the whole batch
planner.py        Planner: maps the ids of batches before the forward pass, now or ahead
reading.py        what the host reads of a device: values of a step at once, scores a batch late
recorded.py       the lookups of a network over hb.Embedding, as its forward pass asks for them
scorer.py         scoring without learning: evaluation, prediction, predict-then-learn
collector.py      Collector: the predictions of all examples
together.py       Together: batches that ranks score together, so that they wait for each other once
turns.py          Turns: what was mapped for the lookups of a forward pass, in their order
"""
