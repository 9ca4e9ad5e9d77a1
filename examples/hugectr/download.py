# SPDX-License-Identifier: Apache-2.0
"""Download the data of an example from its publisher, after you accepted the publisher's terms.

    python examples/hugectr/download.py mind data/mind
    python examples/hugectr/download.py criteo_1tb data/criteo --files 1

An interrupted download resumes where it ended. Archives are unpacked. Digests are compared where
the publisher states one.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass, field
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path

HUGGING_FACE = "https://huggingface.co/datasets"
MONTHS = ("2019-Oct", "2019-Nov", "2019-Dec", "2020-Jan", "2020-Feb", "2020-Mar", "2020-Apr")


@dataclass(frozen=True)
class DataSet:
    """Files of a publisher, and the terms under which they may be used.

    `digests`: SHA-256 (hex) by URL, where the publisher states one.
    """

    title: str
    terms: str
    urls: list[str]
    digests: dict[str, str] = field(default_factory=dict)


DATA_SETS = {
    "criteo": DataSet(
        "Criteo's display advertising challenge: 45 million impressions",
        "Criteo's terms, no commercial use: https://ailab.criteo.com/ressources/",
        [
            "https://go.criteo.net/criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz"
        ],
    ),
    "criteo_1tb": DataSet(
        "Criteo's 1 TB click logs: 24 days, 4 billion impressions",
        "CC BY-NC-SA 4.0, no commercial use: https://ailab.criteo.com/ressources/",
        [f"{HUGGING_FACE}/criteo/CriteoClickLogs/resolve/main/day_{day}.gz" for day in range(24)],
    ),
    "rees46": DataSet(
        "REES46's events of a store with many categories: 7 months, 412 million events",
        "free with a link to REES46 Marketing Platform: https://rees46.com/en/datasets",
        [f"https://data.rees46.com/datasets/marketplace/{month}.csv.gz" for month in MONTHS],
    ),
    "mind": DataSet(
        "Microsoft News: impressions of a million users",
        "Microsoft Research License Terms, no commercial use: https://msnews.github.io/",
        [
            f"{HUGGING_FACE}/Recommenders/MIND/resolve/main/MINDlarge_train.zip",
            f"{HUGGING_FACE}/Recommenders/MIND/resolve/main/MINDlarge_dev.zip",
        ],
    ),
}


def accepted(data_set: DataSet) -> bool:
    """Show the terms, and ask whether the user accepts them."""
    print(data_set.title, data_set.terms, sep="\n")
    return input("Do you accept them? [yes/no] ").strip().lower() == "yes"


def download(url: str, folder: Path, digest: str | None = None) -> Path:
    """Return the file in the folder; download it, or the rest of it, if it is not there."""
    whole = folder / url.rpartition("/")[2]
    if whole.exists():
        print(f"{whole}: already there")
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{whole.name}.partial"
    _receive(url, partial)
    with open(partial, "rb") as file:
        got = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in (None, got):
        partial.unlink()
        sys.exit(f"{url}: expected SHA-256 {digest}, got {got}. Download it again.")
    partial.rename(whole)
    print(f"{whole}: {whole.stat().st_size:,} bytes")
    return whole


def _receive(url: str, partial: Path) -> None:
    """Bring `partial` to its full size, beginning where it ends."""
    note = partial.with_name(f"{partial.name}.version")
    begin = partial.stat().st_size if partial.exists() and note.exists() else 0
    request = urllib.request.Request(url)
    if begin:
        # A server whose file has changed since then answers with the whole of it.
        request.add_header("Range", f"bytes={begin}-")
        request.add_header("If-Range", note.read_text())
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            expected = _write(response, partial, note, begin)
    except urllib.error.HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            sys.exit(f"{url}: the server answered {error.code} {error.reason}. Is it still there?")
        expected = int(error.headers["Content-Range"].rpartition("/")[2])
    except OSError as error:
        sys.exit(f"{url}: the connection broke, got {error}. Run the same command to resume.")
    num_bytes = partial.stat().st_size
    if num_bytes != expected:
        sys.exit(
            f"{url}: expected {expected:,} bytes, got {num_bytes:,}. Run the same command to resume."
        )
    note.unlink(missing_ok=True)


def _write(response: HTTPResponse, partial: Path, note: Path, begin: int) -> int:
    """Write what the server sends, and return the size that the whole file will have."""
    resumes = response.status == HTTPStatus.PARTIAL_CONTENT
    tag = response.headers.get("ETag") or "W/"
    version = response.headers.get("Last-Modified") if tag.startswith("W/") else tag
    if version:
        note.write_text(version)
    with open(partial, "ab" if resumes else "wb") as file:
        shutil.copyfileobj(response, file)
    rest = int(response.headers["Content-Length"])
    return begin + rest if resumes else rest


def unpack(archive: Path) -> None:
    """Unpack a zip or tar file into a folder of its own; leave other files as they are."""
    folder = archive.with_name(archive.name.removesuffix(".zip").removesuffix(".tar.gz"))
    if folder == archive or folder.exists():
        return
    partial = folder.with_suffix(".unpacking")
    safe = None if archive.suffix == ".zip" else "data"
    shutil.unpack_archive(archive, partial, filter=safe)
    partial.rename(folder)
    print(f"{folder}: unpacked")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("data", choices=DATA_SETS)
    p.add_argument("folder", type=Path)
    p.add_argument("--files", type=int, help="only so many of the files, from the first on")
    p.add_argument("--accept-terms", action="store_true", help="do not ask")
    arguments = p.parse_args()
    data_set = DATA_SETS[arguments.data]
    if not arguments.accept_terms and not accepted(data_set):
        sys.exit("Nothing was downloaded.")
    for url in data_set.urls[: arguments.files]:
        unpack(download(url, arguments.folder, data_set.digests.get(url)))


if __name__ == "__main__":
    main()
