# SPDX-License-Identifier: Apache-2.0
"""What every test lives by: the wheel is what is tested, skips are few and named, nothing leaks
from test to test.
"""

from __future__ import annotations

import faulthandler
import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis.internal.conjecture import providers

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / "tests" / "soak"))  # for `import driver`
sys.path.append(str(ROOT / "tests"))
sys.path.append(str(Path(sys.prefix) / "torchrec"))  # see constraints-torchrec.txt
pytest_plugins = ["schedule", "quick"]

# Networks and tables of tests are tiny: threads of torch would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# what is printed does not depend on the terminal, or on there being none
os.environ.setdefault("COLUMNS", "120")

# A shell ignores SIGINT for what it starts in the background, and so would all that tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# no test asserts a time; `make soak` draws many examples
settings.register_profile("hotbed", deadline=None, max_examples=8)
settings.register_profile("soak", deadline=None, max_examples=200)
settings.load_profile("hotbed")
# Each worker would parse the sources of TorchRec for constants to draw, in 3.4 CPU seconds.
providers.is_local_module_file = lambda path: False

# At Python's own thresholds, a quarter of the CPU time goes into garbage collections that walk
# through all imported modules again and again. None runs before all files are imported.
gc.disable()
gc.set_threshold(20_000, 20, 20)

# A skip with any other reason fails the run: a test that nobody runs proves nothing.
ALLOWED_SKIPS = (
    "shared data absent",
    "torch absent",
    "torch too old",
    "GPU absent",
    "compiler absent",
    "doctest.h absent",
    "Chromium absent",
    "ray absent",
    "open files limited",
    "needs /proc",
    "network namespaces absent",
    "cgroups absent",
    "OpenTelemetry absent",
    "Prometheus absent",
    "mounts absent",
    "disk space absent",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--without-shared",
        action="store_true",
        help="run only what needs the shared folder, as where there is none",
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.option.without_shared:
        items[:] = [item for item in items if "shared_data" in getattr(item, "fixturenames", ())]


@pytest.hookimpl(trylast=True)  # after pytest, which has the stacks written to stderr
def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        file = _stacks_folder() / f"{os.getppid()}-{config.workerinput['workerid']}"
        stacks = file.open("w")
        faulthandler.enable(stacks)
        config.add_cleanup(stacks.close)
        config.add_cleanup(faulthandler.disable)
    if os.environ.get("HOTBED_TEST_WHEEL"):
        import hotbed

        if (
            ROOT in Path(hotbed.__file__).resolve().parents
            and "site-packages" not in hotbed.__file__
        ):
            raise pytest.UsageError(
                f"the tests would import the tree ({hotbed.__file__}), not the installed wheel"
            )


def pytest_collection_finish() -> None:
    """Leave what is imported out of garbage collections."""
    # Pytest attaches its handlers six times a test to each logger that does not propagate.
    for name, logger in logging.root.manager.loggerDict.items():
        if name.startswith("torch") and isinstance(logger, logging.Logger):
            logger.propagate = True
    gc.freeze()
    gc.enable()


def _unnamed_skips(session: pytest.Session) -> list[str]:
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    found = []
    for report in reporter.stats.get("skipped", []) if reporter else []:
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not reason.removeprefix("Skipped: ").startswith(ALLOWED_SKIPS):
            found.append(f"{report.nodeid}: {reason}")
    return found


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    from forked import COMMANDS, SERVER

    SERVER.close()
    COMMANDS.close()
    if _unnamed_skips(session) and session.exitstatus == 0:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def _stacks_folder() -> Path:
    """Where a worker that crashes writes its stacks, which are printed at the end of the run."""
    folder = Path(tempfile.gettempdir(), "hotbed-crashes")
    folder.mkdir(exist_ok=True)
    return folder


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for file in sorted(_stacks_folder().glob(f"{os.getpid()}-*")):
        stacks = file.read_text()
        file.unlink()
        if stacks:
            terminalreporter.write_line(f"the stacks of worker {file.name.partition('-')[2]}")
            terminalreporter.write_line(stacks)
    session = getattr(terminalreporter, "_session", None)
    for line in _unnamed_skips(session) if session else []:
        terminalreporter.write_line(f"SKIP WITHOUT AN ALLOWED REASON {line}", red=True)


@pytest.fixture
def shared_data(request: pytest.FixtureRequest) -> Path:
    """The folder of larger data sets that may lie beside the checkout; tests that need it are
    skipped elsewhere.
    """
    folder = ROOT.parent / "shared" / "data"
    if request.config.option.without_shared or not folder.is_dir():
        pytest.skip("shared data absent")
    return folder


@pytest.fixture(scope="session")
def browsed() -> Callable[[str, int], str]:
    """Shows a page in a browser for virtual milliseconds, and returns the document that it is then."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("Chromium absent")

    def document(address: str, milliseconds: int) -> str:
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        budget = f"--virtual-time-budget={milliseconds}"
        command = [chromium, *flags, budget, address]
        return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout

    return document


@pytest.fixture
def shipped_data() -> Path:
    """The data sets that the repository ships."""
    return ROOT / "data"


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Let torch use one thread: small networks are slower on two."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def lives() -> Any:
    """Trains in a forked process: `lives(root, kill={…})`, see tests/soak/driver.py."""
    import driver

    return driver.lives


@pytest.fixture(autouse=True)
def _leaves_no_trace() -> Iterator[None]:
    """End what a test started. A test that changes the environment or leaves a thread that would
    keep the process alive fails itself.
    """
    from started import end_all

    environment = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    threads = set(threading.enumerate())
    yield
    end_all()
    now = {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}
    # Libraries that set a variable when first imported are not the test's doing; a changed or lost
    # one is.
    changed = sorted(k for k, v in environment.items() if now.get(k) != v)
    left = [t for t in set(threading.enumerate()) - threads if not t.daemon]
    for thread in left:  # one that ends by itself, such as a reader ahead, leaves nothing
        thread.join(10)
    left = [t for t in left if t.is_alive()]
    assert not changed, f"the test changed environment variables: {changed}"
    assert not left, f"the test left threads running: {left}"


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """Torch's global generator starts every test alike; hotbed's own draws are functions of their
    seeds.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return
    if torch.cuda.is_initialized():
        torch.manual_seed(0)
    else:  # `torch.manual_seed` formats its stack for each kind of device that is not in use
        torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _exports_and_commands_are_shared() -> None:
    from exported_once import export_once
    from read_once import read_commands_once, read_tables_once

    read_commands_once()
    read_tables_once()
    export_once()
