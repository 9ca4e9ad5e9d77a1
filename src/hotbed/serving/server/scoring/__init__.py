# SPDX-License-Identifier: Apache-2.0
"""From a decoded request to its scores.

models.py    the models of a server: which version each serves, and how it follows its trainer
batching.py  requests of all clients, gathered into batches
"""
