# SPDX-License-Identifier: Apache-2.0
"""FeatureSpec, under the name that programs import it by."""

from hotbed.compat.mx_rec.feature_spec import FeatureSpec, Thresholds

__all__ = ["FeatureSpec", "Thresholds"]
