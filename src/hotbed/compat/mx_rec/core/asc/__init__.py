# SPDX-License-Identifier: Apache-2.0
"""Features, insert functions and the start of the pipeline.

feature_spec.py  FeatureSpec, Thresholds: a feature, its table and its thresholds
helper.py        get_asc_insert_func: maps the ids of a data set ahead
manager.py       start_asc_pipeline: step 8 of the FeatureSpec mode
"""
