# SPDX-License-Identifier: Apache-2.0
"""Names of the collections of a program, and the enumerations that its arguments take."""

from __future__ import annotations

from enum import Enum
from typing import Self

from hotbed.config import did_you_mean
from hotbed.errors import ConfigError

__all__ = [
    "ASCEND_CUTTING_POINT_INITIALIZER",
    "ASCEND_GLOBAL_HASHTABLE_COLLECTION",
    "ASCEND_SPARSE_LOOKUP_ENTRANCE",
    "ASCEND_SPARSE_LOOKUP_ID_OFFSET",
    "ASCEND_SPARSE_LOOKUP_LOCAL_EMB",
    "ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS",
    "ASCEND_TIMESTAMP",
    "All2allGradientsOp",
    "ApplyGradientsStrategy",
    "LIBREC_EOS_OPS_SO",
    "LIBREC_TF_REC_V1_CPU_SO",
    "BaseEnum",
    "MxRecMode",
]

ASCEND_CUTTING_POINT_INITIALIZER = "ASCEND_CUTTING_POINT_INITIALIZER"
ASCEND_GLOBAL_HASHTABLE_COLLECTION = "ASCEND_GLOBAL_HASHTABLE_COLLECTION"
ASCEND_SPARSE_LOOKUP_ENTRANCE = "ASCEND_SPARSE_LOOKUP_ENTRANCE"
ASCEND_SPARSE_LOOKUP_ID_OFFSET = "ASCEND_SPARSE_LOOKUP_ID_OFFSET"
ASCEND_SPARSE_LOOKUP_LOCAL_EMB = "ASCEND_SPARSE_LOOKUP_LOCAL_EMB"
ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS = "ASCEND_SPARSE_LOOKUP_UNIQUE_KEYS"
ASCEND_TIMESTAMP = "ASCEND_TIMESTAMP"
LIBREC_EOS_OPS_SO = "librec_eos_ops.so"
LIBREC_TF_REC_V1_CPU_SO = "librec_tf_rec_v1_cpu.so"  # its later name


class BaseEnum(Enum):
    """An enumeration whose members are found by their values."""

    @classmethod
    def mapping(cls, value: object) -> Self:
        """Return the member with a value, or the member itself.

        Raises:
            ConfigError: no member has this value. It is a ValueError, too.
        """
        for member in cls:
            if value in (member, member.value):
                return member
        values = [member.value for member in cls]
        raise ConfigError(
            f"{cls.__name__}: a value of {values} is needed, got {value!r}. "
            f"{did_you_mean(str(value), values)}"
        )


class MxRecMode(BaseEnum):
    """Where ids become rows: `ASC`, on the host, is the only mode."""

    ASC = "ASC"


class All2allGradientsOp(BaseEnum):
    """How gradients of several ranks are joined. There is one rank, so that both are the same."""

    SUM_GRADIENTS = "sum_gradients"
    SUM_GRADIENTS_AND_DIV_BY_RANKSIZE = "sum_gradients_and_div_by_ranksize"


class ApplyGradientsStrategy(BaseEnum):
    """Whether gradients of an id are summed before its update; here they always are."""

    DIRECT_APPLY = "direct_apply"
    SUM_SAME_ID_GRADIENTS_AND_APPLY = "sum_same_id_gradients_and_apply"
