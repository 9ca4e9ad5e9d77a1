# SPDX-License-Identifier: Apache-2.0
"""Names by which Rec SDK sets up a program.

initialize.py          init, its end, and the iterators of automatic mode
variable.py            dense parameters, sparse tables, collections
ops.py                 import_host_pipeline_ops
log.py                 the logger of the door
tf_version_adapter.py  hccl_ops: reductions over ranks
communication/         ranks
"""

from hotbed.compat.mx_rec.util.communication.hccl_ops import get_rank_id, get_rank_size
from hotbed.compat.mx_rec.util.log import logger

__all__ = ["get_rank_id", "get_rank_size", "logger"]
