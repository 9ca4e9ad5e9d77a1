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
import sys
import tarfile
import urllib.error
import urllib.request
import zipfile
from dataclasses import dataclass
from http import HTTPStatus
from http.client import HTTPResponse
from pathlib import Path

CHUNK_BYTES = 1 << 20
CRITEO = "https://ailab.criteo.com/ressources/"
HUGGING_FACE = "https://huggingface.co/datasets"
MONTHS = ("2019-Oct", "2019-Nov", "2019-Dec", "2020-Jan", "2020-Feb", "2020-Mar", "2020-Apr")


@dataclass(frozen=True)
class File:
    """A file of a publisher. `sha256`: in hex, if the publisher states it."""

    url: str
    sha256: str | None = None

    @property
    def name(self) -> str:
        """The name on disk."""
        return self.url.rpartition("/")[2]


@dataclass(frozen=True)
class DataSet:
    """Files of a publisher, and the terms under which they may be used."""

    title: str
    terms: str
    page: str
    files: tuple[File, ...]


DATA_SETS = {
    "criteo": DataSet(
        "Criteo's display advertising challenge: 45 million impressions",
        "Criteo's terms: no commercial use",
        CRITEO,
        (
            File(
                "https://go.criteo.net/criteo-research-kaggle-display-advertising-challenge-dataset.tar.gz"
            ),
        ),
    ),
    "criteo_1tb": DataSet(
        "Criteo's 1 TB click logs: 24 days, 4 billion impressions",
        "CC BY-NC-SA 4.0: no commercial use",
        f"{HUGGING_FACE}/criteo/CriteoClickLogs",
        tuple(
            File(f"{HUGGING_FACE}/criteo/CriteoClickLogs/resolve/main/day_{day}.gz")
            for day in range(24)
        ),
    ),
    "rees46": DataSet(
        "REES46's events of a store with many categories: 7 months, 412 million events",
        "free to use with a link to REES46 Marketing Platform",
        "https://rees46.com/en/datasets",
        tuple(
            File(f"https://data.rees46.com/datasets/marketplace/{month}.csv.gz") for month in MONTHS
        ),
    ),
    "mind": DataSet(
        "Microsoft News: impressions of a million users",
        "Microsoft Research License Terms: no commercial use",
        "https://msnews.github.io/",
        tuple(
            File(f"{HUGGING_FACE}/Recommenders/MIND/resolve/main/MINDlarge_{part}.zip")
            for part in ("train", "dev")
        ),
    ),
}


def accepted(data_set: DataSet) -> bool:
    """Show the terms, and ask whether the user accepts them."""
    print(f"{data_set.title}\nterms: {data_set.terms}\nread them at {data_set.page}")
    return input("Do you accept them? [yes/no] ").strip().lower() == "yes"


def download(file: File, folder: Path) -> Path:
    """Return the file in the folder; download it, or the rest of it, if it is not there."""
    whole = folder / file.name
    if whole.exists():
        print(f"{whole}: already there")
        return whole
    folder.mkdir(parents=True, exist_ok=True)
    partial = folder / f"{file.name}.partial"
    _receive(file.url, partial)
    digest = _sha256(partial) if file.sha256 else None
    if digest != file.sha256:
        partial.unlink()
        sys.exit(
            f"{file.url}: expected the SHA-256 {file.sha256}, got {digest}. Download it again."
        )
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
        while piece := response.read(CHUNK_BYTES):
            file.write(piece)
    rest = int(response.headers["Content-Length"])
    return begin + rest if resumes else rest


def _sha256(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def unpack(archive: Path) -> None:
    """Unpack a zip or tar file into a folder of its own; leave other files as they are."""
    name = archive.name.removesuffix(".zip").removesuffix(".tar.gz")
    folder = archive.with_name(name)
    if folder == archive or folder.exists():
        return
    partial = archive.with_name(f"{name}.unpacking")
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as packed:
            packed.extractall(partial)
    else:
        with tarfile.open(archive) as packed:
            packed.extractall(partial, filter="data")
    partial.rename(folder)
    print(f"{folder}: unpacked")


def main() -> None:
    p = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("data", choices=DATA_SETS)
    p.add_argument("folder", type=Path)
    p.add_argument("--files", type=int, help="only so many of the files, from the first on")
    p.add_argument("--base", help="another server that has the files, such as a mirror")
    p.add_argument("--accept-terms", action="store_true", help="do not ask")
    arguments = p.parse_args()
    data_set = DATA_SETS[arguments.data]
    if not arguments.accept_terms and not accepted(data_set):
        sys.exit("Nothing was downloaded.")
    for file in data_set.files[: arguments.files]:
        if arguments.base:
            file = File(f"{arguments.base.rstrip('/')}/{file.name}", file.sha256)
        unpack(download(file, arguments.folder))


if __name__ == "__main__":
    main()
