# SPDX-License-Identifier: Apache-2.0
"""Several versions of a model answer at once, by a rule that a file holds."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tritonclient.grpc as triton
import tritonclient.http as triton_http
import xxhash
import yaml
from prometheus_client.parser import text_string_to_metric_families
from tritonclient.utils import InferenceServerException

import hotbed as hb
from hotbed.errors import ConfigError, FormatError, NotServed, PersistError
from hotbed.persist.container.format import open_checkpoint
from hotbed.persist.publish import Follower, PublishDirectory
from hotbed.serving.protocol.inputs import Candidates
from hotbed.serving.routes.changing import RouteWatcher
from hotbed.serving.routes.editing import change_routes, differ, replica_routes
from hotbed.serving.routes.leases import Leases
from hotbed.serving.routes.rule import Canary, LogRule, Shadow
from hotbed.serving.routes.split import UserSplit
from hotbed.serving.server.options import NO_LOGS, LogOptions
from hotbed.serving.server.scoring.models import Models
from hotbed.serving.server.scoring.shadow import ShadowScorer
from hotbed.serving.server.traffic import ShadowCounts
from hotbed.serving.session import Scores
from hotbed.serving.stores.mapped import MappedVersion
from hotbed.serving.stores.verifying import verify_served

from .conftest import Held, Process, Running, Trainer, Workers, draw, wait_for
from .test_grpc import tensors
from .test_http import body
from .test_request_log import stock_tensors

NUM_USERS = 100_000


def hash_of(salt: str, value: object) -> int:
    """The hash of docs/routing.md, written again."""
    return xxhash.xxh64_intdigest(b"\0".join([salt.encode(), b"m", str(value).encode()]))


def logged_in(log: Path) -> list[dict[str, Any]]:
    """The rows of a request log, one for each request, in their order."""
    rows = []
    for part in sorted(log.glob("*.parquet")):
        rows += pq.read_table(part).to_pylist()
    return sorted(rows, key=lambda row: row["served_at"])


def session_of(trainer: Trainer, version: int) -> hb.InferenceSession:
    """A session over a published version itself."""
    server = hb.ParameterServer()
    server.load("m", trainer.folder / "export")
    loaded = server.load("m", open_checkpoint(trainer.folder / "published", version))
    return hb.InferenceSession(loaded)


def change_bytes(path: Path) -> None:
    """Change the first bytes of each row of a file, which processes have mapped."""
    with path.open("r+b") as file:
        data = bytearray(file.read())
        for place in range(3, len(data) // 3, 16):
            data[place] ^= 0x40
        file.seek(0)
        file.write(data)


class Routed:
    """A server in this process that follows a trainer of three versions, and its file of rules."""

    def __init__(self, folder: Path, exported: Path) -> None:
        self.trainer = Trainer(folder, exported)
        self.trainer.publisher = PublishDirectory(folder / "published", keep=9)
        self.file = folder / "routes.yaml"
        self.revision = 0
        self.sessions = dict[int, hb.InferenceSession]()
        self.versions = [self.trainer.publish(seed, full=seed != 1) for seed in range(3)]
        self.log = folder / "log" / "m"
        (folder / "key").write_text("k" * 16)
        logs = LogOptions(
            str(folder / "log"),
            log_sample=0,
            log_key_file=str(folder / "key"),
            log_flush_seconds=0.02,
            log_part_seconds=0.1,
        )
        self.models = Models(hb.ParameterServer(folder / "rows"), logs=logs)
        self.published = folder / "published"
        self.models.add("m", folder / "export")
        self.models.follow("m", lambda: Follower(self.published), poll_seconds=0.1)
        places = {"m": [self.published]}
        leases = Leases("rows", places)
        self.watcher = RouteWatcher(self.file, places, self.models.rules, leases, logs.check_rule)
        self.running = Running(exported, models=self.models)
        self.model = self.models.named("m")
        self.models.check_kept(0.05)
        wait_for(lambda: self.model.versions == [str(self.versions[-1])], "the newest is served")

    def write(self, rule: Any, revision: int | None = None) -> None:
        """Put a rule of the model into the file, and have the server look at it."""
        self.revision = revision or self.revision + 1
        models = {"m": rule} if rule is not None else {}
        self.text(yaml.safe_dump({"revision": self.revision, "models": models}))

    def text(self, text: str | bytes) -> None:
        self.file.write_bytes(text if isinstance(text, bytes) else text.encode())
        for _ in range(2):
            self.watcher.step()

    def ask(self, user: int, version: int | None = None) -> tuple[int, str]:
        """Ask for one user, and return version and route of the answer, which is that version's."""
        columns = {**draw(5, user), "user": [user] * 5}
        context = {"user": columns.pop("user")[0]}
        with hb.Client(f"http://{self.running.http}") as client:
            scores = client.ask("m", columns, context, version=version)
        expected = self.expected(scores.version).predict(columns, context)
        assert np.abs(scores.outputs["prediction"] - expected).max() < 1e-6
        return scores.version, scores.route

    def logged(self) -> list[dict[str, Any]]:
        return logged_in(self.log)

    def expected(self, version: int) -> hb.InferenceSession:
        """A session over the published version itself."""
        if version not in self.sessions:
            self.sessions[version] = session_of(self.trainer, version)
        return self.sessions[version]


@pytest.fixture(scope="module")
def routed(exported: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Routed]:
    routed = Routed(tmp_path_factory.mktemp("routed"), exported)
    yield routed
    routed.running.close()


def text_of(value: int) -> pa.Array:
    return pa.array([str(value)])


def number_of(value: int) -> Any:
    return np.array([value], np.float64)


def integer_of(value: int) -> Any:
    return np.array([value])


@pytest.mark.parametrize("column", [integer_of, number_of, text_of])
def test_the_side_of_each_of_20_000_ids_is_that_of_the_documented_hash(
    column: Callable[[int], Any],
) -> None:
    """Whoever is on the side of the canary stays there when its share grows."""
    ids = (np.arange(20_000) * 977 - 10_000_000).tolist()
    before = set[int]()
    for share in (0.0, 0.05, 0.5, 1.0):
        split = UserSplit(Canary(1, share, "user", "nov28"), "m")
        sides = [split.is_canary(Candidates(1, {}, {"user": column(one)})) for one in ids]
        canary = {one for one, side in zip(ids, sides, strict=True) if side}
        assert canary == {one for one in ids if hash_of("nov28", one) < share * 2**64}
        assert before <= canary
        assert abs(len(canary) / len(ids) - share) < 0.01
        before = canary


def test_requests_without_one_user_have_no_side() -> None:
    split = UserSplit(Canary(1, 1.0, "user"), "m")
    columns: list[dict[str, Any]] = [
        {},
        {"user": np.array([1, 2])},
        {"user": np.array([np.nan])},
        {"user": np.array([0.5])},
        {"user": pa.array([""])},
        {"user": pa.array([None], pa.string())},
        {"user": pa.array(["a", "b"])},
    ]
    assert [split.is_canary(Candidates(2, each, {})) for each in columns] == [None] * 7
    for same in ({"user": np.array([7, 7])}, {"user": pa.array(["a", "a"])}):
        assert split.is_canary(Candidates(2, same, {}))


def curl(*arguments: str) -> str:
    return subprocess.check_output(["curl", "-s", *arguments], text=True)


def test_each_version_answers_requests_that_name_it(routed: Routed, tmp_path: Path) -> None:
    """Over REST, gRPC and curl; another version is a 404 with those that are loaded."""
    first, second, newest = routed.versions
    routed.write({"stable": {"pin": second}, "shadow": {"version": first}})
    assert routed.ask(1) == (second, "stable")
    assert [routed.ask(1, version) for version in routed.versions] == [
        (version, "version") for version in routed.versions
    ]
    with pytest.raises(NotServed, match=f"is not loaded, got {second}, {first}, {newest}"):
        routed.ask(1, 12345)

    asked = routed.trainer.asked
    with triton.InferenceServerClient(routed.running.grpc) as client:
        for version in routed.versions:
            answer = client.infer("m", tensors(asked), model_version=str(version))
            response = answer.get_response()
            assert response.model_version == str(version)
            assert response.parameters["route"].string_param == "version"
            scores = answer.as_numpy("prediction")
            assert np.abs(scores - routed.trainer.scores[version]).max() < 1e-6
        assert client.is_model_ready("m", str(first))
        assert not client.is_model_ready("m", "12345")
        with pytest.raises(InferenceServerException, match="is not loaded"):
            client.infer("m", tensors(asked), model_version="12345")
        listed = client.get_model_repository_index(as_json=True)["models"]
        assert [entry["version"] for entry in listed] == list(map(str, [second, first, newest]))

    with triton_http.InferenceServerClient(routed.running.http) as http:
        metadata = http.get_model_metadata("m", str(first))
        assert metadata["versions"] == list(map(str, [second, first, newest]))
        for version in routed.versions:
            rest = http.infer("m", stock_tensors(triton_http, asked), model_version=str(version))
            assert rest.get_response()["model_version"] == str(version)
            scores = rest.as_numpy("prediction")
            assert np.abs(scores - routed.trainer.scores[version]).max() < 1e-6
        with pytest.raises(InferenceServerException, match="is not loaded"):
            http.infer("m", stock_tensors(triton_http, asked), model_version="12345")
    sent = tmp_path / "request.json"
    sent.write_text(json.dumps(body()))
    for version, status in ((first, 200), (newest, 200), (12345, 404)):
        url = f"http://{routed.running.http}/v2/models/m/versions/{version}"
        assert int(curl("-o", os.devnull, "-w", "%{http_code}", f"{url}/ready")) == status
        *_, answer = curl("-i", "-d", f"@{sent}", f"{url}/infer").splitlines()
        assert json.loads(answer).get("model_version") == (str(version) if status == 200 else None)


def test_each_user_is_on_one_side_and_answers_never_mix(routed: Routed) -> None:
    """`ask` compares each answer with the version that it names."""
    first, second, newest = routed.versions
    for share in (0.3, 0.6, 0.0):
        canary = {"version": first, "share": share, "by": "user", "salt": "s"}
        routed.write({"stable": {"pin": second}, "canary": canary})
        for user in range(40):
            is_canary = hash_of("s", user) < share * 2**64
            expected = (first, "canary") if is_canary else (second, "stable")
            assert routed.ask(user) == expected
    routed.write({"canary": {"version": "newest", "share": 1, "by": "user"}})
    assert routed.ask(3) == (newest, "canary")
    routed.write(None)
    assert routed.ask(3) == (newest, "stable")


@pytest.mark.soak
@pytest.mark.timeout(1800)
def test_the_score_of_each_of_100_000_ids_betrays_its_side(routed: Routed) -> None:
    """Each version has another score for the user: it says who answered."""
    first, second, _ = routed.versions
    canary = {"version": first, "share": 0.3, "by": "user", "salt": "s"}
    routed.write({"stable": {"pin": second}, "canary": canary})
    users = np.arange(10**6, 10**6 + NUM_USERS)
    one = {name: values[:1] for name, values in draw(1, 1).items() if name != "user"}
    scores = {}
    for version in (first, second):
        parts = []
        for some in np.array_split(users, -(-NUM_USERS // 1000)):
            columns = {name: list(values) * len(some) for name, values in one.items()}
            parts.append(routed.expected(version).predict({**columns, "user": some}))
        scores[version] = np.concatenate(parts)
    assert np.mean(np.abs(scores[first] - scores[second]) > 1e-5) > 0.999
    with hb.Client(f"http://{routed.running.http}") as client:
        for place, user in enumerate(users.tolist()):
            side = first if hash_of("s", user) < 0.3 * 2**64 else second
            (score,) = client.predict("m", one, {"user": user})
            assert abs(score - scores[side][place]) < 1e-6, user


def test_metrics_and_the_page_count_each_version(routed: Routed) -> None:
    first, second, _ = routed.versions
    canary = {"version": first, "share": 0.5, "by": "user", "salt": "s"}
    routed.write({"stable": {"pin": second}, "canary": canary})
    answers = Counter(routed.ask(user) for user in range(20))
    with hb.Client(f"http://{routed.running.http}") as client:
        client.ask("m", draw(5, 1))
        (model,) = client.status()["models"]
    counts = {(each["version"], each["route"]): each for each in model["routes"]["traffic"]}
    text = routed.models.meters.text().decode()
    samples = {
        (sample.name, sample.labels.get("version"), sample.labels.get("route")): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    for (version, route), number in answers.items():
        total = counts[version, route]
        assert total["requests"] >= number
        assert total["rows"] == 5 * total["requests"] == total["scores"]
        labels = (str(version), route)
        assert samples["hotbed_version_requests_total", *labels] == total["requests"]
        assert samples["hotbed_version_seconds_count", *labels] == total["requests"]
        mean = total["score_sum"] / total["scores"]
        assert samples["hotbed_version_mean_score", *labels] == pytest.approx(mean)
    assert samples["hotbed_unsplit_requests_total", None, None] >= 1
    assert samples["hotbed_routes_revision", None, None] == routed.revision
    url = f"http://{routed.running.http}/"
    page = subprocess.check_output(["curl", "-s", url]).decode()
    table = page.partition("<table")[2].partition("</table>")[0]
    assert f"<td>canary</td><td>{first}</td>" in table
    assert f"<td>stable</td><td>{second}</td>" in table
    assert re.search(r"<td>newest</td><td>\d+</td><td>[^<]+</td><td></td><td></td>", table)
    assert "0.5 by user" in table
    assert "requests name no user of the canary" in page


def test_a_pinned_version_stays_while_others_are_published(routed: Routed) -> None:
    first = routed.versions[0]
    routed.write({"stable": {"pin": first}})
    for seed in range(10, 13):
        version = routed.trainer.publish(seed, full=seed == 11)
        wait_for(lambda version=version: str(version) in routed.model.versions, "it is loaded")
        assert routed.ask(1) == (first, "stable")
        assert routed.ask(1, version) == (version, "version")
    pinned = routed.model.current.version
    assert isinstance(pinned, MappedVersion)
    assert all((pinned.folder / name).exists() for name in pinned.files())  # for other processes
    routed.versions[2] = version
    routed.write({"stable": {"follow": True}})
    assert routed.ask(1) == (version, "stable")


BAD = {
    "torn": "revision: 99\nmodels:\n  m:\n    stable: {pin: 4",
    "empty": "",
    "not a mapping": "[1, 2]",
    "not UTF-8": b"revision: 99\n\xff",
    "two keys": "revision: 99\nrevision: 100\n",
    "no revision": "models: {}",
    "text as revision": "revision: new",
    "fraction as revision": "revision: 99.5",
    "negative revision": "revision: -1",
    "huge revision": "revision: 1e30",
    "null as revision": "revision:",
    "bool as revision": "revision: true",
    "lower revision": "revision: 0\nmodels: {m: {stable: {pin: 1}}}",
    "another key": "revision: 99\nmodel: {}",
    "list of models": "revision: 99\nmodels: [m]",
    "null as models": "revision: 99\nmodels:",
}
BAD_RULES = {
    "null": None,
    "text": "follow",
    "list": [],
    "unknown key": {"stabel": {"follow": True}},
    "log": {"log": {"path": "/log"}},
    "empty stable": {"stable": {}},
    "text as stable": {"stable": "follow"},
    "number as stable": {"stable": 4},
    "pin and follow": {"stable": {"pin": 1, "follow": True}},
    "neither": {"stable": {"follow": False}},
    "text as pin": {"stable": {"pin": "newest"}},
    "negative pin": {"stable": {"pin": -1}},
    "fraction as pin": {"stable": {"pin": 1.5}},
    "list of pins": {"stable": {"pin": [1]}},
    "pin that is not there": {"stable": {"pin": 987}},
    "canary that is not there": {"canary": {"version": 987, "share": 0.1, "by": "user"}},
    "shadow that is not there": {"shadow": {"version": 987}},
    "canary without version": {"canary": {"share": 0.1, "by": "user"}},
    "canary without share": {"canary": {"version": "newest", "by": "user"}},
    "canary without column": {"canary": {"version": "newest", "share": 0.1}},
    "canary of text": {"canary": {"version": "latest", "share": 0.1, "by": "user"}},
    "share above 1": {"canary": {"version": "newest", "share": 1.01, "by": "user"}},
    "share in percent": {"canary": {"version": "newest", "share": "5%", "by": "user"}},
    "negative share": {"canary": {"version": "newest", "share": -0.1, "by": "user"}},
    "share that is no number": {
        "canary": {"version": "newest", "share": float("nan"), "by": "user"}
    },
    "infinite share": {"canary": {"version": "newest", "share": float("inf"), "by": "user"}},
    "unknown column": {"canary": {"version": "newest", "share": 0.1, "by": "usr"}},
    "label as column": {"canary": {"version": "newest", "share": 0.1, "by": "label"}},
    "number as column": {"canary": {"version": "newest", "share": 0.1, "by": 5}},
    "column of fractions": {"canary": {"version": "newest", "share": 0.1, "by": "price"}},
    "number as salt": {"canary": {"version": "newest", "share": 0.1, "by": "user", "salt": 5}},
    "NUL in salt": {"canary": {"version": "newest", "share": 0.1, "by": "user", "salt": "a\0"}},
    "unknown key of canary": {"canary": {"version": 1, "share": 0.1, "by": "user", "of": 1}},
    "shadow without version": {"shadow": {}},
    "sample above 1": {"shadow": {"version": "newest", "sample": 2}},
    "negative rate": {"shadow": {"version": "newest", "rows_per_second": -1}},
    "text as rate": {"shadow": {"version": "newest", "rows_per_second": "many"}},
    "place of a log": {"log": {"path": "/log"}},
    "sample of a log above 1": {"log": {"sample": 1.5}},
    "text for columns to omit": {"log": {"omit": "user"}},
    "unknown column to omit": {"log": {"omit": ["usr"]}},
    "unknown column to hash": {"log": {"hash": ["usr"]}},
    "unknown key of a log": {"log": {"flush_seconds": 1}},
    "text for the bytes of a log": {"log": {"max_bytes": "10 GB"}},
    "no bytes of a log": {"log": {"max_bytes": 0}},
}


def test_a_bad_file_of_rules_is_refused_by_name_and_the_rule_stays(routed: Routed) -> None:
    first = routed.versions[0]
    routed.write({"stable": {"pin": first}})
    whole = routed.file.read_bytes()
    cases = {**BAD}
    for name, rule in BAD_RULES.items():
        cases[name] = yaml.safe_dump({"revision": 99, "models": {"m": rule}})
    cases["unknown model"] = yaml.safe_dump({"revision": 99, "models": {"n": {}}})
    cases["the same revision"] = yaml.safe_dump({"revision": routed.revision, "models": {}})
    cases["an older file"] = yaml.safe_dump({"revision": routed.revision - 1, "models": {}})
    assert len(cases) >= 50
    for name, text in cases.items():
        routed.text(text)
        reason = routed.model.reason
        assert "its rules are not in force" in reason, name
        assert "routes" in reason
        assert routed.model.versions[0] == str(first), name
        assert routed.models.ready
    routed.file.unlink()
    routed.text(b"")
    assert "its rules are not in force" in routed.model.reason
    assert routed.ask(1) == (first, "stable")
    routed.text(whole)
    assert routed.model.reason == ""


def test_an_unloaded_model_holds_up_no_rule(routed: Routed) -> None:
    first, second, _ = routed.versions
    canary = {"version": second, "share": 1, "by": "user"}
    rule = {"stable": {"pin": first}, "canary": canary}
    routed.write(rule)
    routed.models.unload("m")
    routed.write(rule)
    assert routed.model.routes_problem == ""
    routed.models.load("m")
    assert routed.model.routing.in_force == routed.models.rules.in_force("m")
    assert routed.ask(1) == (second, "canary")


def test_a_mounted_config_map_is_followed(routed: Routed, tmp_path: Path) -> None:
    """The platform replaces a link to a folder, and never the file."""
    first, second, _ = routed.versions
    mounted, file = tmp_path / "mounted", routed.file
    mounted.mkdir()
    (mounted / "routes.yaml").symlink_to("..data/routes.yaml")
    file.unlink(missing_ok=True)
    file.symlink_to(mounted / "routes.yaml")
    for number, version in enumerate((first, second)):
        routed.revision += 1
        content = mounted / f"..{number}"
        content.mkdir()
        rule = {"revision": routed.revision, "models": {"m": {"stable": {"pin": version}}}}
        (content / "routes.yaml").write_text(yaml.safe_dump(rule))
        (mounted / "..new").symlink_to(content.name)
        (mounted / "..new").rename(mounted / "..data")
        for _ in range(2):
            routed.watcher.step()
        assert routed.ask(1) == (version, "stable")
    file.unlink()


def test_a_shadow_scores_answered_requests_and_counts_their_differences(routed: Routed) -> None:
    first, second, _ = routed.versions
    counts = routed.model.shadow_counts
    before = counts.requests
    routed.write({"stable": {"pin": second}, "shadow": {"version": first}})
    assert {routed.ask(user) for user in range(20)} == {(second, "stable")}
    wait_for(lambda: counts.requests - before == 20, "the shadow scores all of them")
    assert counts.different > 0
    assert counts.difference_most >= counts.difference_sum / counts.rows > 1e-6
    routed.write({"stable": {"pin": second}, "shadow": {"version": second}})
    different, seen = counts.different, counts.requests
    routed.ask(1)
    wait_for(lambda: counts.requests > seen, "the shadow scores it")
    assert counts.different == different
    routed.write({"stable": {"pin": second}, "shadow": {"version": first, "rows_per_second": 0}})
    dropped = counts.dropped
    routed.ask(1)
    assert counts.dropped == dropped + 1


def test_a_shadow_outlives_scores_that_cannot_be_compared() -> None:
    """Scores that are infinite or NaN, and an output of another width; none is in the sums."""
    answered = np.zeros(3, np.float32)
    outputs = [
        np.array([np.inf, np.nan, 0.5], np.float32),
        np.zeros((3, 2), np.float32),
        np.array([0, 0, 0.25], np.float32),
    ]
    scored = iter([Scores(2, {"y": values}) for values in outputs])
    served: Any = SimpleNamespace(session=SimpleNamespace(ask=lambda *asked: next(scored)))
    request: Any = SimpleNamespace(size=3, num_rows=3, columns={}, context={})
    counts = ShadowCounts()
    shadow = ShadowScorer(Shadow(1), lambda: served, counts, lambda *compared: None)
    for _ in outputs:
        shadow.offer(request, Scores(1, {"y": answered}))
    expected = ShadowCounts(3, 9, different=7, difference_sum=0.75, difference_most=0.5)
    wait_for(lambda: counts == expected, "all are compared")
    shadow.close()


def test_the_request_log_goes_by_the_rule(routed: Routed) -> None:
    """Each request by the rule under which it was answered; without one, by the settings."""
    first = routed.versions[0]
    stable = {"stable": {"pin": first}}
    steps: list[tuple[dict[str, Any], set[str]]] = [
        ({"log": {"sample": 1}}, {"user", "item", "price"}),
        ({"log": {"sample": 1, "omit": ["item"], "hash": ["user"]}}, {"user", "price"}),
        ({"log": {"sample": 1, "omit": ["price"]}}, {"user", "item"}),
        ({}, set()),
        ({"log": {"sample": 1}}, {"user", "item", "price"}),
    ]
    before = len(routed.logged())
    for number, (rule, _) in enumerate(steps):
        routed.write({**stable, **rule})
        routed.ask(number)
    wait_for(lambda: len(routed.logged()) == before + 4, "all but that of the settings")
    rows = routed.logged()[before:]
    columns = [set(row).intersection({"user", "item", "price"}) for row in rows]
    assert columns == [expected for _, expected in steps if expected]
    users = [row["user"] for row in rows]
    assert [users[0], *users[2:]] == [[0], [2], [4]]
    assert len(users[1][0]) == 16  # a hash
    routed.write({**stable, "log": {"max_bytes": 1}})
    wait_for(lambda: not list(routed.log.glob("*.parquet")), "the parts beyond its bytes are gone")


def test_a_shadow_whose_rule_has_ended_counts_what_it_drops() -> None:
    counts = ShadowCounts()
    scored = list[object]()
    shadow = ShadowScorer(Shadow("newest"), lambda: None, counts, lambda *each: scored.append(each))
    for _ in range(3):
        shadow.offer(Mock(size=1), Mock())
    wait_for(lambda: counts.dropped == 3, "all are counted")
    shadow.close()
    assert (counts.requests, counts.errors, scored) == (0, 0, [])


def test_the_logged_scores_of_a_shadow_are_measured(routed: Routed, tmp_path: Path) -> None:
    """On the same candidates as the answers, and against AUCs by counting pairs."""
    first, second, _ = routed.versions
    before = set(routed.log.glob("*.parquet"))
    num_before = len(routed.logged())
    shadow = {"version": first}
    routed.write({"stable": {"pin": second}, "shadow": shadow, "log": {"sample": 1}})
    for user in range(25):
        routed.ask(user)
    wait_for(lambda: len(routed.logged()) == num_before + 50, "the shadow's rows are logged")
    routed.write({"stable": {"pin": second}, "shadow": shadow})  # the log has none of these
    counts = routed.model.shadow_counts
    seen = counts.requests
    routed.ask(26)
    wait_for(lambda: counts.requests > seen, "a shadow that is not logged")
    seen = counts.requests + counts.dropped
    for user in range(5):
        routed.ask(user)
    routed.write({"stable": {"pin": second}})  # what the shadow has not scored is counted
    wait_for(lambda: counts.requests + counts.dropped == seen + 5, "all five are counted")
    log = tmp_path / "log"
    log.mkdir()
    for part in set(routed.log.glob("*.parquet")) - before:
        shutil.copy(part, log)
    rows = logged_in(log)
    answers = {row["request_id"]: row for row in rows if row["route"] == "stable"}
    shadows = {row["request_id"]: row for row in rows if row["route"] == "shadow"}
    assert len(answers) == len(shadows) == 25
    assert answers.keys() == shadows.keys()
    clicks, labels = [], list[bool]()
    for name, row in answers.items():
        assert {(row["version"]), (shadows[name]["version"])} == {second, first}
        assert shadows[name]["served_at"] > row["served_at"]
        assert shadows[name]["item"] == row["item"]
        clicked = [item.endswith(("1", "4", "7")) for item in row["item"]]
        labels += clicked
        later = shadows[name]["served_at"] + timedelta(milliseconds=1)
        for position in np.flatnonzero(clicked).tolist():
            clicks.append({"request_id": name, "position": position, "served_at": later})
    end = rows[-1]["served_at"] + timedelta(hours=1)
    clicks.append({"request_id": "end", "position": 0, "served_at": end})
    pq.write_table(pa.Table.from_pylist(clicks), tmp_path / "clicks.parquet")

    def shown(**settings: Any) -> hb.sources.RequestLog:
        return hb.sources.RequestLog(log, follow=False, **settings)

    samples = hb.sources.Join(
        shown(shadows=True),
        hb.sources.Parquet(tmp_path / "clicks.parquet"),
        on=["request_id", "position"],
        within=600,
        time="served_at",
        unit="us",
    )
    measured = hb.ServingQuality(samples, user="user", seconds=None).measure()
    (difference,) = [
        row
        for row in measured.differences.to_pylist()
        if row["route"] == "shadow" and row["column"] is None
    ]
    aucs = []
    for logged in (shadows, answers):
        scores = np.concatenate([logged[name]["score"] for name in answers])
        pairs = scores[np.array(labels)][:, None] - scores[~np.array(labels)][None, :]
        aucs.append(np.mean((pairs > 0) + 0.5 * (pairs == 0)))
    assert difference["samples"] == len(labels) == 125
    assert difference["auc"] == pytest.approx(aucs[0] - aucs[1], abs=1e-9)
    assert aucs[0] != aucs[1]
    assert sum(batch.num_rows for batch, _ in shown().read()) == 125  # for training: each once


def test_a_log_that_the_server_does_not_have_is_refused(tmp_path: Path) -> None:
    rule = LogRule(hash=["user"])
    with pytest.raises(ConfigError, match=r"m\.log: the server writes no request log.*--set log="):
        NO_LOGS.check_rule(rule, "routes.models.m.log")
    with pytest.raises(ConfigError, match=r"log\.hash: needs a key.*--set log_key_file="):
        LogOptions(str(tmp_path)).check_rule(rule, "routes.models.m.log")
    with pytest.raises(ConfigError, match=r"log\.max_bytes: a topic keeps what its broker"):
        LogOptions("kafka://broker:9092/shown").check_rule(LogRule(max_bytes=1), "log")


def own_rows(routed: Routed) -> list[Path]:
    """The files of rows that the pinned version has, and the newest one has not."""
    pinned = routed.model.current.version
    newest = routed.model.loaded(routed.model.versions[-1]).version
    assert isinstance(pinned, MappedVersion)
    assert isinstance(newest, MappedVersion)
    names = sorted(pinned.files() - newest.files())
    return [pinned.folder / name for name in names if name.endswith(".rows")]


def test_damaged_versions_of_a_rule_are_written_anew(routed: Routed) -> None:
    """The pinned version and the canary share a file. `ask` compares each answer."""
    first, second, _ = routed.versions
    canary = {"version": second, "share": 0.5, "by": "user", "salt": "s"}
    routed.write({"stable": {"pin": first}, "canary": canary})
    sides = [routed.ask(user) for user in range(6)]
    assert len(set(sides)) == 2
    damaged = own_rows(routed)
    for path in damaged:
        change_bytes(path)
    with pytest.raises(AssertionError):
        [routed.ask(user) for user in range(6)]
    # a check that had begun before finds some of them
    wait_for(lambda: all(path.name in routed.model.reason for path in damaged), "all are found")
    assert "damaged files of versions" in routed.model.reason
    routed.watcher.step()
    assert [routed.ask(user) for user in range(6)] == sides
    roles = routed.model.routing.roles
    assert [roles[role].version.mended for role in ("stable", "canary")] == [1, 1]
    assert routed.model.reason == ""


def test_a_publisher_keeps_what_a_rule_names_and_no_longer(routed: Routed) -> None:
    """Under `keep=1`; a lease is over after a week."""
    trainer = routed.trainer
    first = routed.versions[0]
    routed.write({"stable": {"pin": first}})
    routed.watcher.step()
    trainer.publisher = PublishDirectory(routed.published, keep=1)
    trainer.publish(20, full=True)
    newest = trainer.publish(21, full=True)
    assert open_checkpoint(routed.published, first).manifest.version == first
    with pytest.raises(PersistError, match=f"Choose one of: {first}, {newest}"):
        open_checkpoint(routed.published, routed.versions[1])
    (leases,) = routed.published.glob("LEASE-*")
    content = json.loads(leases.read_text())
    leases.write_text(json.dumps({**content, "written": content["written"] - 8 * 86_400}))
    trainer.publish(22, full=True)
    with pytest.raises(PersistError, match="no state has this version"):
        open_checkpoint(routed.published, first)
    assert routed.model.versions[0] == str(first)  # the rows of the server stay
    rows = routed.trainer.folder / "rows"
    verify_served(rows)
    path = own_rows(routed)[0]
    change_bytes(path)
    with pytest.raises(FormatError, match=re.escape(path.name)):
        verify_served(rows)
    wait_for(lambda: routed.models.rules.is_damaged("m"), "it is found")  # `check_kept` goes on
    routed.watcher.step()
    assert "a damaged version of its rules stays" in routed.model.reason
    assert routed.model.versions[0] == str(first)


@pytest.mark.slow
def test_workers_answer_by_one_rule_also_those_that_start_later(
    trainer: Trainer, tmp_path: Path
) -> None:
    """The trainer keeps one full, and goes on; the pinned version outlives that in the rows."""
    file = tmp_path / "routes.yaml"
    trainer.publisher = PublishDirectory(trainer.folder / "published", keep=1)
    first = trainer.publish(0, full=True)
    arguments = (
        f"m={trainer.folder / 'export'}",
        *("--watch", trainer.folder / "published"),
        *("--routes", file),
        *("--set", f"rows={tmp_path / 'rows'}"),
        *("--set", f"log={tmp_path / 'log'}", "--set", "log_sample=0"),
        *("--set", "log_flush_seconds=0.02", "--set", "log_part_seconds=0.1"),
    )
    server = Workers(*arguments)
    asked = trainer.asked

    def versions() -> set[int]:
        """Which versions answer, over a connection each; each answer is that of its version."""
        answers = set()
        for _ in range(12):
            with hb.Client(f"http://{server.http}") as client:
                scores = client.ask("m", asked)
            expected = trainer.scores[scores.version]
            assert np.abs(scores.outputs["prediction"] - expected).max() < 1e-6
            answers.add(scores.version)
        return answers

    wait_for(lambda: versions() == {first}, "the first version")
    change_routes(file, "m", {"stable": str(first)})

    def revisions() -> list[str]:
        text = server.get("/metrics")[1]
        return re.findall(r'hotbed_routes_revision{model="m",worker="\w+"} (\d+)', text)

    wait_for(lambda: len(revisions()) == 3, "the rule in all processes")
    for seed in range(1, 4):
        newest = trainer.publish(seed, full=True)
    wait_for(lambda: server.get(f"/v2/models/m/versions/{newest}/ready")[0] == 200, "newest")
    assert versions() == {first}
    change_routes(file, "m", {"canary": f"{newest}=100%", "by": "user"})
    wait_for(lambda: {float(each) for each in revisions()} == {2.0}, "in all processes")
    with hb.Client(f"http://{server.http}") as client:
        columns = {**asked, "user": [7] * 30}
        scores = client.ask("m", columns)
        assert (scores.version, scores.route) == (newest, "canary")
        assert client.ask("m", asked).route == "stable"  # several users: none
    os.kill(server.children[0], signal.SIGKILL)
    change_routes(file, "m", {"stable": str(first), "canary": "none"})
    wait_for(lambda: server.told("ended with -9"), "a worker is gone")
    wait_for(
        lambda: (
            'hotbed_worker_up{worker="2"} 1.0' in server.get("/metrics")[1]
            and len(revisions()) == 3
            and set(revisions()) == {"3"}
        ),
        "the rule in all processes",
        120,
    )
    assert versions() == {first}
    rows = replica_routes([f"http://{server.http}"])
    assert [(row.model, row.revision, row.stable, row.canary) for row in rows] == [
        ("m", 3, first, "")
    ]
    assert not differ(rows)
    assert not list((tmp_path / "log" / "m").glob("*.parquet"))
    rule = yaml.safe_load(file.read_text())["models"]["m"]
    models = {"m": {**rule, "log": {"sample": 1, "omit": ["item"]}}}
    file.write_text(yaml.safe_dump({"revision": 4, "models": models}))
    wait_for(lambda: set(revisions()) == {"4"}, "the rule of the log in all processes")
    assert versions() == {first}
    wait_for(lambda: len(logged_in(tmp_path / "log" / "m")) == 12, "each worker logs all of it")
    assert all("item" not in row for row in logged_in(tmp_path / "log" / "m"))
    server.stop(signal.SIGKILL)
    change_routes(file, "m", {"stable": str(first)})
    server = Process(*arguments)
    assert versions() == {first}


@pytest.mark.slow
def test_servers_before_a_parameter_server_answer_by_its_rule(
    trainer: Trainer, tmp_path: Path
) -> None:
    """Pins, canaries and shadows; each answer is compared with the version that it names."""
    file, published = tmp_path / "routes.yaml", trainer.folder / "published"
    trainer.publisher = PublishDirectory(published, keep=9)
    first = trainer.publish(0, full=True)
    newest = trainer.publish(1)
    source = (f"m={trainer.folder / 'export'}", "--watch", published, "--routes", file)
    rows = Held(tmp_path / "rows", *source)
    log = ("--set", f"log={tmp_path / 'log'}", "--set", "log_flush_seconds=0.02")
    remote = f"m=grpc://127.0.0.1:{rows.port}"
    server = Workers(remote, "--set", "cache_deadline_seconds=10", *log)
    sessions = dict[int, hb.InferenceSession]()

    def ask(user: int | None = None) -> tuple[int, str]:
        columns = {**draw(5, 3)}
        context = {} if user is None else {"user": user}
        if context:
            del columns["user"]
        with hb.Client(f"http://{server.http}") as client:
            scores = client.ask("m", columns, context)
        if scores.version not in sessions:
            sessions[scores.version] = session_of(trainer, scores.version)
        expected = sessions[scores.version].predict(columns, context)
        assert scores.late == 0
        assert np.abs(scores.outputs["prediction"] - expected).max() < 1e-6
        return scores.version, scores.route

    def answers(n: int = 8) -> set[tuple[int, str]]:
        """Over a connection each, so that both workers answer."""
        return {ask() for _ in range(n)}

    def status() -> dict[str, Any]:
        with hb.Client(f"http://{server.http}") as client:
            routes: dict[str, Any] = client.status()["models"][0]["routes"]
        return routes

    wait_for(lambda: answers() == {(newest, "")}, "the newest version, without a rule", 60)
    change_routes(file, "m", {"stable": str(first)})
    wait_for(lambda: answers() == {(first, "stable")}, "the pinned version", 60)
    newest = trainer.publish(2)
    wait_for(lambda: rows.told(f"has version {newest}"), "another version", 60)
    assert answers() == {(first, "stable")}

    canary = {"canary": "newest=50%", "by": "user", "salt": "s", "shadow": "newest"}
    change_routes(file, "m", canary)
    wait_for(lambda: status()["revision"] == 2, "the canary in all processes", 60)
    wait_for(lambda: status()["roles"]["canary"]["version"] == newest, "the newest", 60)

    def sides(canary: int) -> bool:
        """Whether each user is on the side of the documented hash."""
        expected = [
            (canary, "canary") if hash_of("s", user) < 2**63 else (first, "stable")
            for user in range(20)
        ]
        return [ask(user) for user in range(20)] == expected

    assert sides(newest)
    wait_for(lambda: status()["shadow"]["requests"] > 0, "the shadow scores", 60)
    assert answers() == {(first, "stable")}  # several users
    newest = trainer.publish(3)
    wait_for(lambda: sides(newest), "the canary follows", 60)
    change_routes(file, "m", {"canary": f"{newest}=50%", "shadow": "none"})
    assert trainer.publish(4) > newest
    wait_for(lambda: status()["revision"] == 3, "the canary of a number", 60)
    assert sides(newest)
    text = server.get("/metrics")[1]
    hits = re.findall(r'hotbed_cache_hits_total{model="m",worker="\d"} (\S+)', text)
    assert len(hits) == 2
    assert sum(map(float, hits)) > 0
    change_routes(file, "m", {"canary": "none"})
    os.kill(server.children[0], signal.SIGKILL)  # the next one obeys from its start
    wait_for(lambda: len(server.children) == 2, "a new worker", 120)
    wait_for(lambda: status()["revision"] == 4, "the rule in all processes", 120)
    assert answers() == {(first, "stable")}
    spec = yaml.safe_load(file.read_text())
    spec = {"revision": 5, "models": {"m": {**spec["models"]["m"], "log": {"omit": ["price"]}}}}
    file.write_text(yaml.safe_dump(spec))
    wait_for(lambda: status()["revision"] == 5, "the rule of the log", 60)
    assert ask(7) == (first, "stable")
    pinned = hb.ParameterServer.connect(f"grpc://127.0.0.1:{rows.port}").model("m")
    assert pinned.version == first
    newest = max(trainer.scores)
    change_routes(file, "m", {"stable": "newest"})
    wait_for(lambda: answers() == {(newest, "stable")}, "the newest version", 60)
    # a server that does not know yet still gets the rows of the version that was pinned
    assert pinned.find({name: np.arange(3) for name in pinned.configs})
    assert server.stop() == 0
    columns = [set(row) for row in logged_in(tmp_path / "log" / "m")]
    assert "price" in columns[0]
    assert "price" not in columns[-1]
