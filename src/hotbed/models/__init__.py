# SPDX-License-Identifier: Apache-2.0
"""Ranking models, one file each.

`model(batch)` returns logits [n], or logits by label for several labels. `recorded` looks at the
tensors of any of them, or of a network of your own.

    aitm.py       adaptive information transfer: events that follow each other
    autoint.py    AutoInt: self-attention over fields
    base_rate.py  the share of positives that a model predicts at first
    bst.py        Behavior Sequence Transformer
    dcn.py        Deep & Cross networks: DCN and DCN-V2
    deepfm.py     DeepFM
    dien.py       Deep Interest Evolution Network
    din.py        Deep Interest Network
    dlrm.py       DLRM
    dnn.py        deep neural network on embeddings
    esmm.py       entire space multi-task model: events that follow each other
    finalmlp.py   FinalMLP: two perceptrons and their products
    fm.py         factorization machine
    losses.py     losses: one number to minimize from predictions and labels
    lr.py         logistic regression
    masknet.py    MaskNet: features times masks that depend on the sample
    mmoe.py       multi-gate mixture of experts: several labels at once
    ple.py        progressive layered extraction: several labels at once
    qnn.py        quadratic neural network
    rankmixer.py  RankMixer: tokens of feature groups that exchange parts
    recorded.py   the current values and gradients of named tensors of a network, by forward hooks
    tasks.py      the labels that a model predicts
    two_tower.py  two towers: users and items as vectors of one space
    wide_deep.py  Wide & Deep
    graph/        networks from JSON descriptions; docs/graphs.md describes the format
    layers/       building blocks of ranking models
"""

from hotbed.models.aitm import AITM
from hotbed.models.autoint import AutoInt
from hotbed.models.base_rate import set_base_rate
from hotbed.models.bst import BST
from hotbed.models.dcn import DCN, DCNv2
from hotbed.models.deepfm import DeepFM
from hotbed.models.dien import DIEN
from hotbed.models.din import DIN
from hotbed.models.dlrm import DLRM
from hotbed.models.dnn import DNN
from hotbed.models.esmm import ESMM
from hotbed.models.finalmlp import FinalMLP
from hotbed.models.fm import FM
from hotbed.models.graph.network import Graph
from hotbed.models.lr import LR
from hotbed.models.masknet import MaskNet
from hotbed.models.mmoe import MMoE
from hotbed.models.ple import PLE
from hotbed.models.qnn import QNN
from hotbed.models.rankmixer import RankMixer
from hotbed.models.recorded import recorded
from hotbed.models.two_tower import TwoTower
from hotbed.models.wide_deep import WideDeep

__all__ = [
    "AITM",
    "AutoInt",
    "BST",
    "DCN",
    "DCNv2",
    "DIEN",
    "DIN",
    "DLRM",
    "DNN",
    "DeepFM",
    "ESMM",
    "FM",
    "FinalMLP",
    "Graph",
    "LR",
    "MMoE",
    "MaskNet",
    "PLE",
    "QNN",
    "RankMixer",
    "TwoTower",
    "WideDeep",
    "recorded",
    "set_base_rate",
]


def __dir__() -> list[str]:
    return sorted(__all__)
