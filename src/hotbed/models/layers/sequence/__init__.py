# SPDX-License-Identifier: Apache-2.0
"""Layers over histories: tensors [n, length, dim] with a mask [n, length].

attend.py       attention over packed rows as an operator of the native core
attention.py    attention of several heads
augru.py        GRU whose updates follow an attention
gru.py          GRU over histories
mask.py         masks of padded sequences from their lengths
packed.py       histories pooled as they are packed, without padding
pad.py          histories of any length as one tensor with a mask
pooling.py      a history pooled by how much its entries matter for a target
transformer.py  a transformer layer for padded sequences
"""

from hotbed.models.layers.sequence.attention import (
    AttentionScores,
    AttentionSum,
    MultiHeadAttention,
)
from hotbed.models.layers.sequence.augru import AUGRU
from hotbed.models.layers.sequence.gru import GRU
from hotbed.models.layers.sequence.mask import SequenceMask
from hotbed.models.layers.sequence.packed import DecayedMean, DotAttentionPooling
from hotbed.models.layers.sequence.pad import PadSequence
from hotbed.models.layers.sequence.pooling import AttentionPooling
from hotbed.models.layers.sequence.transformer import TransformerLayer

__all__ = [
    "AUGRU",
    "GRU",
    "AttentionPooling",
    "AttentionScores",
    "AttentionSum",
    "DecayedMean",
    "DotAttentionPooling",
    "MultiHeadAttention",
    "PadSequence",
    "SequenceMask",
    "TransformerLayer",
]
