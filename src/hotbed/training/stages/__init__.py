# SPDX-License-Identifier: Apache-2.0
"""The stages of a step, in the order in which the loop calls them.

agreement.py      what ranks compare before and at each step
example.py        an item of a dataset as the arguments of a network
compared.py       settings of a program as plain values, which ranks compare
batch_weights.py  weights of ids that a batch brings along, and that learn
criterion.py      the loss function of a model, checked against labels and outputs
fetcher.py        Fetcher: tables on a disk begin to read the rows of batches that come later
grains.py         a step that runs its batch grain by grain, and joins what they leave
learner.py        forward, backward and update
map_stage.py      MapStage: decides how far ids are mapped, and lets a thread map them
mapper.py         Mapper: maps the ids of a network's batches before its forward pass, or ahead
network.py        what the loop asks of a network that it does not call with a batch as it is
one_pass.py       which models are scored by the forward pass that learns
planner.py        Planner: maps the ids of batches for the collections of a network
rank_mapper.py    RankMapper: asks for the ids of coming batches whose rows lie on several ranks
rank_learner.py   a step by grains that several processes compute
recorded.py       the lookups of a network over hb.Embedding, as its forward pass asks for them
scorer.py         scoring without learning: evaluation, prediction, predict-then-learn
turns.py          lookups that are mapped before the forward pass, which takes their rows in turn
"""
