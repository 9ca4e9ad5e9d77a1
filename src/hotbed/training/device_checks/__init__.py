# SPDX-License-Identifier: Apache-2.0
"""Whether a device computes the dense part rightly: what `hotbed doctor --device` asks of it.

checks.py   the checks
trial.py    a small training with drawn data, which they compare with the CPU's
"""
