# SPDX-License-Identifier: Apache-2.0
"""Run the sample scripts and training files of HugeCTR's releases, and write what happened.

    python scripts/hugectr_samples.py HUGECTR_REPOSITORY

The repository is a clone of NVIDIA-Merlin/HugeCTR with its tags. Each file runs as it is in its
release, by `python -m hotbed.compat.hugectr.run`, for 50 iterations on generated data of a
fraction of the size; files that are the same in several releases run once.
docs/migrate/hugectr_samples.md is the result. Results are kept in --work, so that a second run
only tries what failed or is new.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import re
import shutil
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from io import BytesIO
from pathlib import Path

from hotbed.compat.hugectr.run import main as run_hugectr

PAGE = Path(__file__).resolve().parent.parent / "docs" / "migrate" / "hugectr_samples.md"
FIRST, LAST = (2, 3), (25, 3)
MAX_ITER = 50
DATA_SCALE = 0.002
LONGEST = 200
TIME_LIMIT = 300
ARGUMENTS = {"samples/ftrl/dlrm_train_ftrl.py": ["--shard_plan", "round_robin"]}
"""Arguments that a script cannot do without."""

UNUSED_KEYS = (
    "max_iter",
    "display",
    "eval_interval",
    "snapshot",
    "snapshot_prefix",
    "export_predictions_prefix",
    "auc_threshold",
    "max_eval_batches",
    "eval_batches",
    "gpu",
)
"""Keys of a solver that a run of 50 iterations does not depend on."""

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(["hotbed.compat.hugectr.run"])

HEADER = """\
# HugeCTR's samples

Each sample script and each JSON file of HugeCTR's releases v2.3 to v25.03, and whether it runs here
as it is, for {max_iter} iterations on generated data:
`python -m hotbed.compat.hugectr.run FILE --max-iter {max_iter} --data-scale {scale}`.
A file that is the same in several releases is one row, and the commit is that of the first of them.
Training files that differ only in names of layers, numbers of iterations and devices run once.
`scripts/hugectr_samples.py` writes this page.
"""


@dataclass(frozen=True)
class Sample:
    """A file of a release: its path, its content's name, and the releases that have it."""

    path: str
    blob: str
    tags: tuple[str, ...]
    commit: str


@dataclass(frozen=True)
class Outcome:
    """What happened: `ran`, or the reason why not. `seconds` of the whole process."""

    ran: bool
    text: str
    seconds: float


class Repository:
    """A clone of HugeCTR's repository."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def tags(self) -> list[str]:
        """Return the releases in their order."""
        suffixes = ["-c", "versionsort.suffix=_alpha", "-c", "versionsort.suffix=_beta"]
        names = self._git(*suffixes, "tag", "--sort=version:refname").decode().split()
        return [name for name in names if _version(name) is not None]

    def samples(self) -> list[Sample]:
        """Return sample scripts and JSON files of all releases, equal ones once."""
        seen: dict[tuple[str, str], list[str]] = {}
        for tag in self.tags():
            for line in self._git("ls-tree", "-r", tag).decode().splitlines():
                description, path = line.split("\t")
                is_script = path.startswith("samples/") and path.endswith(".py")
                if is_script or path.endswith(".json"):
                    seen.setdefault((path, description.split()[2]), []).append(tag)
        samples = []
        for (path, blob), tags in sorted(seen.items(), key=lambda item: (item[0][0], item[1])):
            commit = self._git("rev-list", "-1", tags[0]).decode().strip()
            samples.append(Sample(path, blob, tuple(tags), commit))
        return samples

    def text(self, sample: Sample) -> str:
        """Return the content of a file."""
        return self._git("cat-file", "-p", sample.blob).decode()

    def extract(self, sample: Sample, folder: Path) -> Path:
        """Write the folder of a file as its first release has it; return the file's path."""
        parent = sample.path.rpartition("/")[0]
        archive = self._git("archive", sample.tags[0], parent)
        with tarfile.open(fileobj=BytesIO(archive)) as files:
            files.extractall(folder, filter="data")
        return folder / sample.path

    def _git(self, *arguments: str) -> bytes:
        command = ["git", "-C", str(self._path), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout

    def places(self, tag: str, text: str) -> list[str]:
        """Return the lines of a release's sources that hold a text, as `path:line`."""
        command = ["git", "-C", str(self._path), "grep", "-nF", text, tag, "--", "HugeCTR"]
        found = subprocess.run(command, capture_output=True, check=False).stdout.decode()
        return [":".join(line.split(":")[1:3]) for line in found.splitlines()]


def _version(tag: str) -> tuple[int, int] | None:
    """Return the numbers of a release between the first and the last; None for other tags."""
    match = re.match(r"v(\d+)\.(\d+)", tag)
    if match is None:
        return None
    version = (int(match[1]), int(match[2]))
    return version if FIRST <= version <= LAST else None


def not_a_job(sample: Sample, text: str) -> str | None:
    """Return why a file is nothing to train; None for a script or a training file."""
    if sample.path.endswith(".py"):
        if re.search(r"^\s*import hugectr", text, re.MULTILINE):
            return None
        modules = re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE)
        frameworks = [name for name in ("nvtabular", "cudf", "torch") if name in modules]
        made_of = f" ({', '.join(frameworks)})" if frameworks else ""
        return f"does not import hugectr{made_of}"
    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        return f"not JSON: {error}"
    if not isinstance(content, dict) or "layers" not in content:
        return "not a network: data of a tool or a test"
    if "solver" not in content:
        return "a network without a solver, for inference"
    return None


def run(repository: Repository, sample: Sample, work: Path) -> Outcome:
    """Run a file as it is in its first release, in a process of its own."""
    folder = work / "run"
    shutil.rmtree(folder, ignore_errors=True)
    script = repository.extract(sample, folder)
    log = work / "logs" / f"{sample.blob}.txt"
    log.parent.mkdir(exist_ok=True)
    arguments = [script.name, "--max-iter", str(MAX_ITER), "--data-scale", str(DATA_SCALE)]
    arguments += ["--data-root", str(folder / "root"), *ARGUMENTS.get(sample.path, ())]
    began = time.monotonic()
    process = _PROCESSES.Process(target=_run_file, args=(arguments, script.parent, log))
    process.start()
    process.join(TIME_LIMIT)
    seconds = time.monotonic() - began
    if process.is_alive():
        process.kill()
        process.join()
        return Outcome(False, f"took more than {TIME_LIMIT} s", seconds)
    output = log.read_text()
    learned = re.findall(r"^rehearsal: learned (\d+) iterations", output, re.MULTILINE)
    if process.exitcode == 0 and learned:
        if int(learned[-1]) >= MAX_ITER:
            return Outcome(True, "ran", seconds)
        if "Hit target accuracy" in output:
            return Outcome(True, f"ran, and reached its AUC after {learned[-1]}", seconds)
    return Outcome(False, _reason(output), seconds)


@dataclass(frozen=True)
class Proof:
    """How a release itself treats a faulty sample.

    Attributes:
        message: what the reason of the failure here contains.
        source: text of the line of HugeCTR's sources.
        files: in which of its files, the first that has it.
        verdict: what the line does.
    """

    message: str
    source: str
    files: tuple[str, ...]
    verdict: str


PROOFS = (
    Proof(
        "no layer above makes it",
        "bottom tensor name does not exists",
        ("pybind/model.cpp", "pybind/model_compile.cpp", "include/parser.hpp"),
        "HugeCTR throws too",
    ),
    Proof(
        "do not fill rows",
        "do_compute(input, label, loss, current_batchsize",
        ("src/loss.cu",),
        "HugeCTR puts several samples into a row, and its loss runs over the samples of the batch, "
        "beyond the rows",
    ),
)


def proof(repository: Repository, sample: Sample, reason: str) -> str:
    """Return where the first release of a faulty sample fails itself; "" if that is not known."""
    tag = sample.tags[0]
    for known in PROOFS:
        if known.message not in reason:
            continue
        places = repository.places(tag, known.source)
        for file in known.files:
            for place in places:
                if place.rpartition(":")[0].endswith(file):
                    return f" {known.verdict}: {place} of {tag}."
    return ""


def _run_file(arguments: list[str], folder: Path, log: Path) -> None:
    """Run a file in this process, which a server forked with the modules imported."""
    with open(log, "wb") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.chdir(folder)
    code = run_hugectr(arguments)
    sys.stdout.flush()
    sys.exit(code)


def _reason(errors: str) -> str:
    lines = [line for line in errors.splitlines() if line.strip()]
    last = lines[-1] if lines else "no message"
    missing = re.match(r"ModuleNotFoundError: No module named '(\w+)", last)
    if missing:
        return f"imports another framework: {missing[1]}"
    message = re.sub(r"^(error|[\w.]+Error): ", "", last)
    if len(message) > LONGEST:
        message = message[: message.rfind(". ", 0, LONGEST) + 1 or LONGEST]
    return message.replace("|", "/")


def outcomes(
    repository: Repository, samples: list[Sample], work: Path, only: str
) -> Iterator[tuple[Sample, Outcome]]:
    """Yield each file to train with what happened; those that ran before are not run again."""
    kept = work / "outcomes.json"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    for sample in samples:
        if not_a_job(sample, repository.text(sample)) is not None:
            continue
        key = _content(sample, repository.text(sample))
        before = known.get(key)
        if (before is None or not before["ran"]) and re.search(only, sample.path):
            outcome = run(repository, sample, work)
            print(
                f"{outcome.seconds:6.1f} s  {sample.path} {sample.tags[0]}: {outcome.text}",
                flush=True,
            )
            known[key] = asdict(outcome)
            kept.write_text(json.dumps(known))
        elif before is not None:
            outcome = Outcome(**before)
        else:
            continue
        yield sample, outcome


def _content(sample: Sample, text: str) -> str:
    """Return a name for what a run of a file depends on.

    Names of layers, numbers of iterations and devices of a training file change nothing.
    """
    if sample.path.endswith(".json"):
        spec = json.loads(text)
        for key in UNUSED_KEYS:
            spec["solver"].pop(key, None)
        for layer in spec["layers"]:
            layer.pop("name", None)
        text = json.dumps(spec, sort_keys=True)
    else:
        text = f"{sample.path} {sample.blob}"
    return hashlib.sha256(text.encode()).hexdigest()


def page(
    repository: Repository, results: list[tuple[Sample, Outcome]], samples: list[Sample]
) -> str:
    """Return the page in Markdown."""
    order = repository.tags()
    lines = [HEADER.format(max_iter=MAX_ITER, scale=DATA_SCALE)]
    num_ran = sum(outcome.ran for _, outcome in results)
    lines.append(f"{num_ran} of {len(results)} files run.\n")
    rest = [(sample, outcome) for sample, outcome in results if not outcome.ran]
    if rest:
        lines.append("| file | releases | why not |\n|---|---|---|")
        for sample, outcome in rest:
            text = outcome.text + proof(repository, sample, outcome.text)
            lines.append(f"| {sample.path} | {_range(sample, order)} | {text} |")
        lines.append("")
    for title, suffix in (("Scripts", ".py"), ("Training files", ".json")):
        lines.append(f"## {title}\n\n| file | releases | commit | result |\n|---|---|---|---|")
        for sample, outcome in results:
            if sample.path.endswith(suffix):
                cells = [sample.path, _range(sample, order), sample.commit[:12], outcome.text]
                lines.append(f"| {' | '.join(cells)} |")
        lines.append("")
    lines.append(
        "## Files that train nothing\n\n| file | releases | commit | what it is |\n|---|---|---|---|"
    )
    for sample in samples:
        reason = not_a_job(sample, repository.text(sample))
        if reason is not None:
            lines.append(
                f"| {sample.path} | {_range(sample, order)} | {sample.commit[:12]} | {reason} |"
            )
    return "\n".join(lines) + "\n"


def _range(sample: Sample, order: list[str]) -> str:
    """Return the releases that have a file, as ranges of the releases in their order."""
    ranges: list[list[str]] = []
    for tag in sample.tags:
        if ranges and order.index(tag) == order.index(ranges[-1][-1]) + 1:
            ranges[-1].append(tag)
        else:
            ranges.append([tag])
    texts = [tags[0] if len(tags) == 1 else f"{tags[0]} to {tags[-1]}" for tags in ranges]
    return ", ".join(texts)


def main() -> None:
    """Run what is to be run, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("repository", type=Path)
    parser.add_argument("--work", type=Path, default=Path("build/hugectr_samples"))
    parser.add_argument("--only", default="", help="run only paths that match this pattern")
    parser.add_argument("--page", type=Path, default=PAGE, help="where the page is written")
    arguments = parser.parse_args()
    work: Path = arguments.work.resolve()
    work.mkdir(parents=True, exist_ok=True)
    repository = Repository(arguments.repository)
    samples = repository.samples()
    results = list(outcomes(repository, samples, work, arguments.only))
    arguments.page.parent.mkdir(exist_ok=True)
    arguments.page.write_text(page(repository, results, samples))


if __name__ == "__main__":
    main()
