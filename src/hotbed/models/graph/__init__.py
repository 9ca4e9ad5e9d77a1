# SPDX-License-Identifier: Apache-2.0
"""Networks from JSON descriptions; docs/graphs.md describes the format.

description.py  read the description of a network
inputs.py       the inputs of a network from a description: from a batch to named tensors
kinds.py        the layers of a network from a description
network.py      Graph: a network from a JSON description, and back
"""
