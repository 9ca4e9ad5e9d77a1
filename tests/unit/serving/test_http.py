# SPDX-License-Identifier: Apache-2.0
"""The Open Inference Protocol over REST, asked by its stock client and by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton

from .conftest import Running, draw


def tensors(columns: dict[str, Any], binary: bool) -> list[Any]:
    kinds = {"user": "INT64", "item": "BYTES", "genres": "BYTES", "price": "FP32"}
    found = []
    for name, values in columns.items():
        array = np.array(values, object) if kinds[name] == "BYTES" else np.asarray(values)
        found.append(triton.InferInput(name, list(array.shape), kinds[name]))
        found[-1].set_data_from_numpy(array, binary_data=binary)
    return found


@pytest.mark.parametrize("binary", [False, True])
def test_the_stock_client_gets_the_scores_of_the_session(running: Running, session: Any, binary: bool) -> None:
    columns = draw(50, 7)
    with triton.InferenceServerClient(running.http) as client:
        found = client.infer("m", tensors(columns, binary), request_id="7",
                             outputs=[triton.InferRequestedOutput("prediction", binary_data=binary)])  # fmt: skip
    assert np.abs(found.as_numpy("prediction") - session.predict(columns)).max() < 1e-6
    assert found.get_response()["id"] == "7"
    assert found.get_response()["model_version"] == str(session.model.version)
