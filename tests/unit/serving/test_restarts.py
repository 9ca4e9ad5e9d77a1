# SPDX-License-Identifier: Apache-2.0
"""What servers leave behind, and what they begin with: forks, kills, a disk that is full."""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from forked import COMMANDS

import hotbed as hb
from hotbed.errors import NotWritten
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.stores.following import collecting

from .conftest import Process, Spawned, Trainer, wait_for

FORKED = """
import os, sys
import hotbed as hb
from hotbed.errors import PersistError
(exported,) = arguments
server = hb.ParameterServer()
server.load("m", exported)
child = os.fork()
if not child:
    try:
        server.load("m", exported)
    except PersistError as error:
        say("refused:", "another process writes it" in str(error))
    sys.exit(0)
os.waitpid(child, 0)
say("there:", server.folder.exists())
say("read:", hb.ParameterServer(server.folder).model("m").version == server.model("m").version)
say(server.folder)
"""


def test_a_forked_child_leaves_the_rows_of_its_parent(exported: Path) -> None:
    *told, folder = COMMANDS.run(FORKED, exported)
    assert told == ["refused: True", "there: True", "read: True"]
    assert not Path(folder).exists()


KILLED = """
import os, signal
import hotbed as hb
from hotbed.serving.stores.following import collecting
server, folder = hb.ParameterServer(), collecting(["kafka://host:1/topic"])
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_folders_of_a_killed_server_go_with_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    COMMANDS.run(KILLED, expected=-signal.SIGKILL)
    assert {path.name.rsplit("-", 1)[0] for path in tmp_path.iterdir()} == {
        "hotbed-rows",
        "hotbed-follow",
    }
    server = hb.ParameterServer()  # without a model, as one whose models come from elsewhere
    with collecting(["published", "kafka://host:1/topic"]) as folder:
        assert set(tmp_path.iterdir()) == {server.folder, folder}
    assert set(tmp_path.iterdir()) == {server.folder}
    with collecting(["published"]):
        assert set(tmp_path.iterdir()) == {server.folder}


def test_a_server_that_ends_before_it_listens_leaves_no_open_pipe() -> None:
    with pytest.raises(AssertionError, match="no disk"):
        Process("m=export", before="raise SystemExit('no disk')")
    (server,) = Spawned.started
    Spawned.stop_all()
    assert server.process.stderr.closed


EXAMPLE = """
import os, signal, sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from serve_and_ask import server
log = Path(sys.argv[3])
with server(Path(sys.argv[2]), log) as address:
    while "listening" not in log.read_text():
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_demo_leaves_no_server(exported: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    examples = Path(__file__).resolve().parents[3] / "examples"
    subprocess.run([sys.executable, "-c", EXAMPLE, str(examples), str(exported), str(log)])
    wait_for(lambda: '"stopped"' in log.read_text(), "its server ends")


FULL_DISK = """
import resource
import hotbed as hb
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.options import RowsOptions
from hotbed.serving.server.endpoints.rows_service import RowsServer
rows, published, limit = arguments
resource.setrlimit(resource.RLIMIT_FSIZE, (int(limit), int(limit)))
models = Models(hb.ParameterServer(rows))
models.add("m", published)
say(models.named("m").current.version.version)
say(models.index()[0]["reason"])
del models
store = hb.ParameterServer(rows)
RowsServer(store, ["m"], RowsOptions(port=0)).load_or_keep("m", published)
say(store.model("m").version)
"""


@pytest.mark.parametrize("limit", [0, 1000])
def test_a_start_while_the_disk_is_full_serves_what_the_folder_holds(
    trainer: Trainer, tmp_path: Path, limit: int
) -> None:
    held = hb.ParameterServer(tmp_path / "rows").load("m", trainer.folder / "export").version
    newest = trainer.publish(1, full=True)
    assert newest > held
    first, reason, second = COMMANDS.run(
        FULL_DISK, tmp_path / "rows", trainer.folder / "published", limit
    )
    assert (first, second) == (str(held), str(held))
    assert "cannot be written" in reason
    models = Models(hb.ParameterServer(tmp_path / "rows"))
    models.add("m", trainer.folder / "published")
    assert models.named("m").current.version.version == newest
    models.close()


def test_a_start_without_rows_needs_a_folder_that_can_be_written(
    exported: Path, tmp_path: Path
) -> None:
    (tmp_path / "rows").write_text("a file")
    with pytest.raises(NotWritten, match="choose another place"):
        Models(hb.ParameterServer(tmp_path / "rows")).add("m", exported)
