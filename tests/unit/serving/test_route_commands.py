# SPDX-License-Identifier: Apache-2.0
"""`hotbed route` and `hotbed rollback MODEL` change the file of rules as a whole."""

from __future__ import annotations

import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import yaml
from forked import SERVER
from typer.testing import CliRunner

from hotbed.cli.commands import app, main
from hotbed.cli.show import print_replicas
from hotbed.errors import ConfigError
from hotbed.serving.routes.editing import ReplicaRoute, change_routes, differ
from hotbed.serving.routes.rule import read_routes


def run(monkeypatch: pytest.MonkeyPatch, *arguments: Any) -> None:
    monkeypatch.setattr("sys.argv", ["hotbed", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code


def test_commands_write_the_rule_with_the_next_revision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("revision: 41\nmodels: {模型: {stable: {pin: 1}}}\n")

    def rule_after(*arguments: str) -> Any:
        run(monkeypatch, *arguments, "--routes", file)
        text = file.read_text()
        assert "模型" in text  # as its people write it
        content = yaml.safe_load(text)
        assert content["models"]["模型"] == {"stable": {"pin": 1}}
        assert read_routes(file).revision == content["revision"]
        return content["revision"], content["models"]["ranker"]

    canary = {"version": 4310, "share": 0.05, "by": "user"}
    assert rule_after("route", "ranker", "--canary", "4310=5%", "--by", "user") == (
        42,
        {"canary": canary},
    )
    assert rule_after("route", "ranker", "--canary", "4310=0.5", "--shadow", "newest") == (
        43,
        {"canary": {**canary, "share": 0.5}, "shadow": {"version": "newest"}},
    )
    assert rule_after("route", "ranker", "--salt", "s", "--shadow", "none")[1] == {
        "canary": {**canary, "share": 0.5, "salt": "s"}
    }
    assert rule_after("rollback", "ranker", "--to", "4213") == (45, {"stable": {"pin": 4213}})
    assert rule_after("route", "ranker", "--stable", "newest") == (46, {})


@pytest.mark.parametrize(
    "changes, reason",
    [
        ({}, "expected a change"),
        ({"stable": "4213.5"}, "--stable: expected the number of a version or newest"),
        ({"stable": "none"}, "--stable: expected the number"),
        ({"canary": "4310", "by": "user"}, "--canary: expected a version and a share"),
        ({"canary": "4310=x", "by": "user"}, "--canary: expected a share, got 'x'"),
        ({"canary": "4310=101%", "by": "user"}, "share: must be from 0 to 1"),
        ({"canary": "4310=5%"}, "--by: a canary needs the column"),
        ({"by": "user"}, "the model has no canary"),
        ({"shadow": "-1"}, "--shadow: expected the number"),
    ],
)
def test_a_wrong_change_leaves_the_file(
    tmp_path: Path, changes: dict[str, str | None], reason: str
) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("revision: 1\n")
    with pytest.raises(ConfigError, match=reason):
        change_routes(file, "ranker", changes)
    assert file.read_text() == "revision: 1\n"


def test_no_command_writes_a_revision_that_servers_refuse(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    last = f"revision: {2**53}\n"
    file.write_text(last)
    with pytest.raises(ConfigError, match=f"revision: must be from 0 to {2**53}, got {2**53 + 1}"):
        change_routes(file, "ranker", {"stable": "1"})
    assert file.read_text() == last


def test_a_rollback_is_of_a_stream_or_of_a_served_model(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    options = ["--to", "4213", "--state", "3", "--routes", str(file)]
    result = CliRunner().invoke(app, ["rollback", "ranker", *options])
    assert isinstance(result.exception, ConfigError)
    assert "expected --state or --to, got both" in str(result.exception)
    assert not file.exists()


def change_as_another(file: Path) -> str:
    """Change a file as a user who may not write it, though its folder; return the error."""
    change_routes(file, "ranker", {"stable": "1"})
    file.chmod(0o444)
    if os.getuid() == 0:
        os.setuid(65534)
    try:
        change_routes(file, "ranker", {"stable": "2"})
    except ConfigError as error:
        return str(error)
    return ""


def test_who_may_not_write_the_file_may_not_route() -> None:
    """A change replaces the file, for which the rights of its folder were enough."""
    with TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        file = Path(folder) / "routes.yaml"
        error = SERVER.call(change_as_another, file)
        assert "so you may not route, got mode 0444" in error
        assert read_routes(file).models["ranker"].stable.pin == 1


def test_a_changed_file_keeps_its_permissions(tmp_path: Path) -> None:
    file = tmp_path / "routes.yaml"
    file.write_text("revision: 1\n")
    file.chmod(0o660)
    change_routes(file, "ranker", {"stable": "1"})
    assert file.stat().st_mode & 0o777 == 0o660


def test_the_link_of_a_platform_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "content").write_text("revision: 1\n")
    file = tmp_path / "routes.yaml"
    file.symlink_to("content")
    with pytest.raises(ConfigError, match="got a link, such as that of a ConfigMap"):
        change_routes(file, "ranker", {"stable": "1"})


def test_replicas_differ_by_rule_version_model_or_problem() -> None:
    one = ReplicaRoute("http://one", "m", 7, 4213)
    two = ReplicaRoute("http://two", "m", 7, 4213)
    assert not differ([one, two])
    for other in (
        ReplicaRoute("http://two", "m", 6, 4213),
        ReplicaRoute("http://two", "m", 7, 4214),
        ReplicaRoute("http://two", "m", 7, 4213, "4310 (5% by user)"),
        ReplicaRoute("http://two", "m", 7, 4213, problem="torn"),
        ReplicaRoute("http://two", problem="no answer"),
        ReplicaRoute("http://two", "n", 7, 4213),
    ):
        assert differ([one, other])


def test_replicas_are_printed_with_their_whole_addresses(
    capsys: pytest.CaptureFixture[str],
) -> None:
    urls = [
        f"http://ranker-{number}.ranker.recommendations-production.svc.cluster.local:8000"
        for number in range(2)
    ]
    print_replicas([ReplicaRoute(url, "ranker", 7, 4213, "4310 (5% by user)") for url in urls])
    printed = capsys.readouterr().out
    assert all(url in printed for url in urls)
