# SPDX-License-Identifier: Apache-2.0
"""How the code of a model is followed: torch.export, torch.fx, and what they leave out.

branches.py   every way through the code of a model
exporting.py  from a function of leaves to ATen operators
packed.py     stand-ins for recurrent layers over packed sequences
recording.py  stand-ins for the lookups of a model that is traced
sources.py    where ids come from
subgraph.py   Subgraph: some nodes of a graph, and what they are computed from
tracer.py     a torch.fx tracer that keeps lookups whole
"""
