# SPDX-License-Identifier: Apache-2.0
"""Building blocks of ranking models: `nn.Module`s that, except `inputs`, do not use tables.

They lie by kind: products of features in `interaction`, linear layers in `dense`, sums and products
of tensors in `arithmetic`, other shapes in `shape`, histories in `sequence`.

    in_batch.py   counts and masks for a softmax over the items of a batch; they use tables
    inputs.py     from a `Batch` to the tensors that layers take
    tensors.py    checks of the tensors that layers are called with
    activation/   activations that torch does not have
    arithmetic/   element by element, matrices, sums over a dimension; of described networks
    dense/        linear layers and what stands between them: perceptrons, normalization, dropout
    interaction/  products of features: cross networks, inner products, factorization machines
    sequence/     layers over histories: tensors [n, length, dim] with a mask [n, length]
    shape/        other shapes of the same values; of described networks
    tasks/        what models with several labels are made of
"""

from hotbed.models.layers.activation import Dice, Softmax
from hotbed.models.layers.arithmetic import (
    Add,
    Cast,
    ElementwiseMultiply,
    MatrixMultiply,
    ReduceMean,
    ReduceSum,
    Scale,
    Sub,
    WeightMultiply,
)
from hotbed.models.layers.dense import (
    MLP,
    BatchNorm,
    Dropout,
    GroupDense,
    LogitHead,
    ReLUDropout,
    xavier_,
)
from hotbed.models.layers.inputs import (
    FeatureInputs,
    History,
    HistoryInputs,
    LinearTerm,
    PositionTerm,
)
from hotbed.models.layers.interaction import (
    BilinearProduct,
    CrossNet,
    CrossNetMix,
    CrossNetV2,
    DotInteraction,
    FeatureGate,
    FieldNorm,
    FMInteraction,
    FMOrder2,
    InteractingLayer,
    MaskBlock,
    QuadraticNet,
    TokenFeedForward,
    TokenMixing,
)
from hotbed.models.layers.sequence import (
    AUGRU,
    GRU,
    AttentionPooling,
    AttentionScores,
    AttentionSum,
    DecayedMean,
    DotAttentionPooling,
    MultiHeadAttention,
    PadSequence,
    SequenceMask,
    TransformerLayer,
)
from hotbed.models.layers.shape import (
    Concat,
    FusedReshapeConcat,
    FusedReshapeConcatGeneral,
    Gather,
    Reshape,
    Slice,
)
from hotbed.models.layers.tasks import ExpertMixture, InformationTransfer, JointLogit

__all__ = [
    "AUGRU",
    "GRU",
    "Add",
    "AttentionPooling",
    "AttentionScores",
    "AttentionSum",
    "BatchNorm",
    "BilinearProduct",
    "Cast",
    "Concat",
    "CrossNet",
    "CrossNetMix",
    "CrossNetV2",
    "DecayedMean",
    "Dice",
    "DotAttentionPooling",
    "DotInteraction",
    "Dropout",
    "ElementwiseMultiply",
    "ExpertMixture",
    "FMInteraction",
    "FMOrder2",
    "FeatureGate",
    "FeatureInputs",
    "FieldNorm",
    "FusedReshapeConcat",
    "FusedReshapeConcatGeneral",
    "Gather",
    "GroupDense",
    "History",
    "HistoryInputs",
    "InteractingLayer",
    "InformationTransfer",
    "JointLogit",
    "LinearTerm",
    "LogitHead",
    "MLP",
    "MaskBlock",
    "MatrixMultiply",
    "MultiHeadAttention",
    "PadSequence",
    "PositionTerm",
    "QuadraticNet",
    "ReLUDropout",
    "ReduceMean",
    "ReduceSum",
    "Reshape",
    "Scale",
    "SequenceMask",
    "Slice",
    "Softmax",
    "Sub",
    "TokenFeedForward",
    "TokenMixing",
    "TransformerLayer",
    "WeightMultiply",
    "xavier_",
]
