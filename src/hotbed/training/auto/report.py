# SPDX-License-Identifier: Apache-2.0
"""The report of a converter: what became of each embedding or table of a model, and why."""

from __future__ import annotations

import textwrap
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from hotbed.files import new_file

_WIDTH = 100  # of the printed report, in characters


class ReportEntry(ABC):
    """What became of one embedding or table."""

    @property
    @abstractmethod
    def is_moved(self) -> bool:
        """Return whether its ids leave the forward pass."""

    @property
    @abstractmethod
    def columns(self) -> tuple[str, str, str]:
        """Return what became of it, its name, and a few words about it."""

    @abstractmethod
    def details(self) -> Iterator[str]:
        """Yield what the report says below the columns, a paragraph each."""


AnyEntry = TypeVar("AnyEntry", bound=ReportEntry)


@dataclass(frozen=True)
class Report(Generic[AnyEntry]):
    """What became of the embeddings or tables of a model.

    `print(report)` shows it, `report.picture(path)` draws it.

    Attributes:
        headline: the result in a sentence.
        model: the name of the model's class.
        entries: one an embedding or table, in the order of the model.
        drawing: draws the report as an SVG.
        num_dense: parameters, in numbers, that stay in the torch optimizer.
        inputs: names of the tensors that the model takes; empty before the first batch.
        notes: what a user should know about the whole model, a sentence each.
    """

    headline: str
    model: str
    entries: tuple[AnyEntry, ...]
    drawing: Callable[[Report[AnyEntry]], str] = field(repr=False)
    num_dense: int = 0
    inputs: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def moved(self) -> tuple[AnyEntry, ...]:
        """Return the entries whose ids leave the forward pass."""
        return tuple(entry for entry in self.entries if entry.is_moved)

    @property
    def kept(self) -> tuple[AnyEntry, ...]:
        """Return the other entries."""
        return tuple(entry for entry in self.entries if not entry.is_moved)

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def picture(self, path: str | Path | None = None) -> str:
        """Draw the model as an SVG that follows the reader's light or dark mode.

        Args:
            path: of the file to write; None = none.

        Returns:
            The SVG.

        Example: `report.picture("model.svg")`
        """
        svg = self.drawing(self)
        if path is not None:
            with new_file(Path(path)) as file:
                file.write(svg.encode())
        return svg

    def _lines(self) -> Iterator[str]:
        yield self.headline
        width = max([len(entry.columns[1]) for entry in self.entries], default=0)
        for entry in self.entries:
            outcome, name, words = entry.columns
            head = f"{outcome}  {name:{width}}  "
            yield ""
            yield head + words
            for text in entry.details():
                yield from _wrapped(text, len(head))
        for note in self.notes:
            yield ""
            yield from _wrapped(note, 0)


def _wrapped(text: str, indent: int) -> list[str]:
    """Return the lines of a text, behind a margin."""
    margin = " " * indent
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=margin,
        subsequent_indent=margin,
        break_long_words=False,
        break_on_hyphens=False,
    )
