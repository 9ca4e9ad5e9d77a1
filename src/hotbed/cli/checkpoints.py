# SPDX-License-Identifier: Apache-2.0
"""What the commands print of checkpoints: what one holds, whether it is whole, how two differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.markup import escape
from rich.table import Table as Grid

from hotbed.cli.show import capacity_text, console, mebibytes, print_derived, print_join, print_line
from hotbed.persist.upkeep.kept import KeptEntries

_BARS = "▁▂▃▄▅▆▇█"


def print_checkpoint(facts: Mapping[str, Any]) -> None:
    """Print what a checkpoint holds, as `hotbed.persist.upkeep.inspect` returns it."""
    size = mebibytes(sum(facts["bytes"]))
    console.print(
        f"{facts['folder']}: {facts['kind']}, version {facts['version']}, {size} MiB",
        highlight=False,
    )
    for name in ("digest", "parent", "positions", "counters"):
        if name != "positions" or "join" not in facts:
            print_line(f"{name:9} {escape(json.dumps(facts[name]))}")
    if "join" in facts:
        print_join(facts["join"])
    for link in facts["chain"]:
        print_line(f"rests on  {link['folder']} {link['digest']}")
    dense = facts["dense"]
    console.print(f"dense     {dense['parameters']:,} parameters in {dense['tensors']} tensors")
    for kind, digest in facts["classes"].items():
        print_line(f"class     {kind} {digest}")
    if "ids" in facts:
        _print_id_graph(facts["ids"])
    for reason in facts["held"]:
        print_line(f"held      {escape(reason)}")
    if facts["forced"]:
        print_line(f"forced    {escape(facts['forced'])}")
    if facts["maps"]:
        print_line(f"maps      {facts['maps']} files of what transforms learned")
    print_derived(facts["derived"])
    console.print(_grid_of(facts["tables"]))
    for table in facts["tables"]:
        if table["on_disk"]:
            print_line(f"{table['name']} on its tier: {table['on_disk']}")


def _print_id_graph(graph: Mapping[str, Any]) -> None:
    """Print the tensors that a model takes, and the lookups whose ids a server computes."""
    for tensor in graph["arguments"]:
        shape = ", ".join(["n", *map(str, tensor["shape"])])
        source = f"{tensor['part']} of column {tensor['column']}"
        print_line(
            f"input     {tensor['name']}: {tensor['dtype']} {escape(f'[{shape}]')}, {source}"
        )
    lookups = ", ".join(map(escape, graph["lookups"]))
    print_line(f"ids       {graph['file']} computes those of {lookups}")


def _grid_of(tables: Iterable[Mapping[str, Any]]) -> Grid:
    """Return a line for each table of a checkpoint."""
    changes = ("here: changed", "removed", "waiting")
    grid = Grid("table", "dim", "rows", "capacity", "MiB", *changes, "norms of rows", "counts")
    for table in tables:
        grid.add_row(
            table["name"],
            str(table["dim"]),
            f"{table['rows']:,}",
            capacity_text(table["rows"], table["capacity"]),
            mebibytes(table["bytes"]),
            f"{table['changed']:,}",
            f"{table['removed']:,}",
            _waiting(table),
            _histogram(table["norms"]),
            _histogram(table["counts"]),
        )
    return grid


def _waiting(table: Mapping[str, Any]) -> str:
    """Return how many ids wait for admission; those in a sketch have no number."""
    if not table["sketched_partitions"]:
        return f"{table['candidates']:,}"
    return f"{table['candidates']:,} + sketch"


def _histogram(bins: Sequence[Mapping[str, float]]) -> str:
    """Return rows by powers of two as one line: `0.0625 ▁▃█▂ 1`."""
    if not bins:
        return ""
    most = max(bin["rows"] for bin in bins)
    bars = ""
    for bin in bins:
        height = int(len(_BARS) * bin["rows"] / (most + 1))
        bars += _BARS[height]
    return f"{bins[0]['from']:g} {bars} {bins[-1]['to']:g}"


def print_verified(facts: Mapping[str, Any]) -> None:
    """Print what was verified, as `hotbed.persist.upkeep.inspect.verify` returns it."""
    if "rows" in facts:
        rows = ", ".join(f"{part} {num_rows:,} rows" for part, num_rows in facts["rows"].items())
        print_line(
            f"{facts['folder']} is whole: prepared, {rows}, {facts['files']} files, "
            f"{mebibytes(facts['bytes'])} MiB\n"
            f"digest   {facts['digest'] or 'not noted by the version that wrote it'}"
        )
        return
    print_line(
        f"{facts['folder']} is whole: {facts['kind']}, version {facts['version']}, "
        f"{facts['links']} links, {facts['files']} files, {mebibytes(facts['bytes'])} MiB\n"
        f"digest   {facts['digest']}\n"
        f"content  {facts['content_digest']}"
    )


def print_verified_rows(facts: Mapping[str, Any]) -> None:
    """Print what was verified, as `verify_served` returns it."""
    versions = [
        f"{name} {'unloaded' if version is None else f'version {version}'}"
        for name, version in facts["models"].items()
    ]
    unchecked = ""
    if facts["unchecked"]:
        unchecked = f"; {facts['unchecked']} of an earlier release have no digest"
    print_line(
        f"{facts['folder']} is whole: served rows, {', '.join(versions)}, {facts['files']} files, "
        f"{mebibytes(facts['bytes'])} MiB{unchecked}"
    )


def print_rolled_back(path: str, facts: Mapping[str, Any]) -> None:
    """Print which state a stream resumes from, as `roll_back` returns it."""
    aside = ", ".join(facts["aside"]) or "nothing"
    print_line(
        f"{path} resumes from {facts['folder']}: {facts['kind']}, version {facts['version']}\n"
        f"moved to {path}/aside: {aside}"
    )


def print_difference(facts: Mapping[str, Any]) -> None:
    """Print what differs between two checkpoints, as `hb.checkpoints.diff` returns it."""
    grid = Grid("table", "added", "removed", "changed", "largest difference")
    for name, table in facts["tables"].items():
        if table is None:
            grid.add_row(name, "only in one")
            continue
        counts = [f"{table[key]:,}" for key in ("added", "removed", "changed")]
        grid.add_row(name, *counts, f"{table['largest']:.3g}")
    console.print(grid)
    if not any(_differs(table) for table in facts["tables"].values()) and not facts["dense"]:
        print_line("all rows and tensors are equal")
    for name, largest in facts["dense"].items():
        text = "other shape"
        if largest is not None:
            text = f"{largest:.3g}"
        console.print(f"{name}: {text}", highlight=False)
    for name in ("positions", "counters"):
        before, after = facts[name]
        if before != after:
            print_line(f"{name}: {before}\n      now: {after}")
    if facts["others"]:
        print_line(f"other parts that differ: {', '.join(facts['others'])}")


def _differs(table: Mapping[str, Any] | None) -> bool:
    return table is None or any(table[key] for key in ("added", "removed", "changed"))


def print_kept(key: str, kept: Sequence[KeptEntries]) -> None:
    """Print the entries that are kept of a key, the newest last."""
    for entries in kept:
        console.print(f"{entries.column} of {key}: {len(entries.times):,} entries", highlight=False)
        grid = Grid("time (UTC)", *entries.parts)
        for line in entries.lines():
            grid.add_row(*line)
        console.print(grid)
