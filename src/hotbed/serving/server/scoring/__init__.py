# SPDX-License-Identifier: Apache-2.0
"""From a decoded request to its scores.

models.py    the models of a server: how each is loaded, and how it follows its trainer
model.py     a model: the version that it serves, its queue, its counts and its last problem
batching.py  requests of all clients, gathered into batches
shadow.py    a version that scores requests once more, after their answers
caches.py    the caches of a model whose rows a parameter server has
routed.py    the rules of the models, as the folder of rows holds them
"""
