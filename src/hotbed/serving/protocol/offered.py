# SPDX-License-Identifier: Apache-2.0
"""The parts of the protocol that the server offers, and checks for the others."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from hotbed.config import did_you_mean
from hotbed.data.arrow_types import time_of
from hotbed.errors import DataError

if TYPE_CHECKING:
    from hotbed.serving.session import Scores

EXTENSIONS = ["binary_tensor_data", "model_repository", "model_configuration", "statistics"]
REQUEST_ID = "x-request-id"
"""The header, or the metadata of a call, with the client's name of a request."""
_IN_HEADERS = "".join(map(chr, range(0x20, 0x7F)))  # characters that any header can hold
_ID_LENGTH = 1024  # of the name of a request in a header
# parameters of tensors that would change an answer
_NOT_OFFERED = ("shared_memory_region", "classification")


def server_metadata() -> dict[str, Any]:
    """Return the server metadata of the protocol."""
    from hotbed import __version__

    return {"name": "hotbed", "version": __version__, "extensions": EXTENSIONS}


def request_id_header(request_id: str) -> dict[str, str]:
    """Return the header, or the metadata, of an answer that names its request.

    Characters that a header cannot hold are percent-encoded. A name is left out if it is empty, or
    has more than 1,024 characters then.
    """
    value = quote(request_id, safe=_IN_HEADERS)
    return {REQUEST_ID: value} if 0 < len(value) <= _ID_LENGTH else {}


def check_tensor_parameters(where: str, parameters: Collection[str]) -> None:
    """Raise DataError for parameters of an input or output that the server does not offer."""
    if not parameters:
        return
    for name in _NOT_OFFERED:
        if name in parameters:
            raise DataError(
                f"{where}: the server does not offer the parameter {name!r}. "
                "Send values in the request, and read them in the answer."
            )


def times_parameter(where: str, parameter: object) -> pa.DataType | None:
    """Return the type of times that the parameter `arrow_type` of an input names, None for None.

    Raises DataError for anything but the name of such a type.
    """
    if parameter is None:
        return None
    kind = time_of(parameter) if isinstance(parameter, str) else None
    if kind is None:
        raise DataError(
            f"{where}: expected an Arrow type of times as arrow_type, got {parameter!r:.60}. Send "
            "one such as 'timestamp[us]' or 'date32[day]', or leave it out."
        )
    return kind


def check_load(parameters: Iterable[str]) -> None:
    """Raise DataError if a load request has its own model files or configuration."""
    for name in parameters:
        if name == "config" or name.startswith("file:"):
            raise DataError(
                f"load: a model is loaded as it was exported, got the parameter {name[:100]!r}. "
                "Export the model that you want, and load it without parameters."
            )


def answer_parameters(scores: Scores) -> dict[str, int | str]:
    """Return the parameters of an answer: what a client has to know of its scores."""
    parameters: dict[str, int | str] = {
        "late_rows": scores.late,
        "nonfinite_scores": scores.nonfinite,
        "route": scores.route,
    }
    return {name: value for name, value in parameters.items() if value}


def choose_outputs(
    outputs: Mapping[str, NDArray[np.float32]], names: Sequence[str] | None
) -> Mapping[str, NDArray[np.float32]]:
    """Return the outputs of these names, or all for None. Raises DataError for unknown names."""
    if names is None:
        return outputs
    for name in names:
        if name not in outputs:
            shown = name[:100]
            raise DataError(
                f"output {shown!r}: the model has no such output. "
                f"{did_you_mean(shown, list(outputs))}"
            )
    return {name: outputs[name] for name in names}
