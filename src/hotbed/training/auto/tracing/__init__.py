# SPDX-License-Identifier: Apache-2.0
"""How the code of a model is followed: torch.export, torch.fx, and what they leave out."""
