# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol without a network: the bytes of a request as columns, and answers.

bodies.py     infer requests as raw bytes
inputs.py     the inputs of a model: which tensors it takes, and those of a request as columns
offered.py    the parts of the protocol that the server offers, and checks for the others
rest.py       infer requests and answers over REST: JSON, and binary tensors behind it
tensors.py    tensors of a request, checked and decoded into columns
"""
