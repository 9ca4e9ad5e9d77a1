# SPDX-License-Identifier: Apache-2.0
"""Doors for users of other frameworks: their names and calls become values of Hotbed.

fuxictr/        FuxiCTR: its experiments become jobs
hugectr/        HugeCTR: scripts, JSON files, weight files, inference
hugectr2onnx/   HugeCTR's converter to ONNX
mx_rec/         Rec SDK: the eight steps of a training program
mindspore_rec/  MindSpore Recommender: RecModel and its parts
no_effect.py    NoEffect: arguments without effect here, and their log lines
"""
