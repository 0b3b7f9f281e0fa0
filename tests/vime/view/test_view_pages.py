"""The pages of a stopped run that has drops, letters, a resume, pending and leased groups."""

from __future__ import annotations

import json
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from plotly.utils import PlotlyJSONEncoder
from werkzeug.test import Client

from recovery.queue_report import status
from recovery.run_location import locate_run
from storage.columns import decode_group
from storage.pool import Pool
from storage.queue_view import QueueView
from tests.storage.test_queue_view import snapshot
from tests.support.eventful_run import copy_run, make_run
from tests.support.step_records import step_record, write_metrics
from vime.cli.main import main
from vime.errors import SettingsError
from vime.view.app import Callbacks
from vime.view.pages.history import compare_page, dead_page, history_page, timeline_page
from vime.view.pages.overview import overview
from vime.view.pages.sample import group_page
from vime.view.pages.samples import NUMBER_FILTERS, WORD_FILTERS, query_of
from vime.view.run_watch import RunWatch
from vime.view.sample_index import Condition, SampleQuery
from vime.view.server import viewer_server, watching


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = make_run(tmp_path_factory.mktemp("made") / "run", monkeypatch)
    write_metrics(run / "metrics.jsonl", [step_record(n, generated=23) for n in (0, 1, 2, 2)])
    return run


@pytest.fixture
def watch(made: Path, tmp_path: Path) -> Iterator[RunWatch]:
    """Read once, without threads."""
    watch = RunWatch(locate_run(copy_run(made, tmp_path / "run")), "run", tmp_path)
    watch.refresh_metrics()
    watch.refresh_queue()
    watch.refresh_samples()
    yield watch
    watch.close()


def text(component: Any) -> str:
    """All that a page says."""
    return json.dumps(component, cls=PlotlyJSONEncoder)


def test_every_accepted_sample_is_in_the_index_with_its_state_and_advantage(watch: RunWatch) -> None:
    view = QueueView(watch.location.pool)
    groups = [g for segment in view.all_segments() for g in segment.groups() if g.result_ref is not None]
    with Pool.open(watch.location.pool) as pool:
        stored = {
            sample.index: sample
            for group in groups
            if group.result_ref is not None
            for sample in decode_group(*vars(pool.read_group(group.result_ref)).values())
        }
    rows = {row["sample_index"]: row for row in watch.index.page(SampleQuery(limit=1000)).rows}
    assert rows.keys() == stored.keys()
    for index, row in rows.items():
        assert (row["prompt"], row["response"]) == (stored[index].prompt, stored[index].response)
        assert row["reward"] == stored[index].reward
    counted = status(watch.location).identity
    trained = watch.index.page(SampleQuery(conditions=(Condition("state", "equals", ("trained",)),)))
    assert trained.num_matching == 2 * counted.trained
    assert {row["advantage"] is None for row in trained.rows} == {False}
    assert len(rows) == 2 * (counted.trained + counted.pending)


def test_the_overview_has_numbers_words_alarms_and_the_queue(watch: RunWatch) -> None:
    found = text(overview(watch.state))
    assert str(status(watch.location).identity) in found
    assert "Generation is the bottleneck" in found
    assert "Failed samples: 1 reward_raised" in found
    assert "vime queue dead RUN --traces" in found


def test_every_filter_that_the_table_offers_is_answered(watch: RunWatch) -> None:
    numbers: dict[str, dict[str, Any]] = {
        name: {"filterType": "number", "type": name, "filter": 1} for name in NUMBER_FILTERS
    }
    numbers["inRange"]["filterTo"] = 2
    for name in ("blank", "notBlank"):
        del numbers[name]["filter"]
    words = [{"filterType": "text", "type": name, "filter": "trained"} for name in WORD_FILTERS]
    models = [{"sample_index": model} for model in numbers.values()] + [{"state": model} for model in words]
    everything = len(watch.index)
    for model in models:
        query = query_of({"startRow": 0, "endRow": 100, "filterModel": model, "sortModel": []}, "")
        assert 0 <= watch.index.page(query).num_matching <= everything
    ordered = query_of(
        {"startRow": 1, "endRow": 3, "filterModel": {}, "sortModel": [{"colId": "reward", "sort": "desc"}]}, "abc"
    )
    assert (ordered.order, ordered.offset, ordered.limit, ordered.text) == ((("reward", "descending"),), 1, 2, "abc")
    with pytest.raises(SettingsError, match="several conditions"):
        query_of({"startRow": 0, "endRow": 1, "filterModel": {"reward": {"operator": "OR", "conditions": []}}}, "")


def test_failures_branches_and_timeline_are_shown(watch: RunWatch) -> None:
    dead, history = text(dead_page(watch.state)), text(history_page(watch.state))
    assert "reward_raised" in dead
    assert "Traceback" in dead
    assert watch.state.history is not None
    assert [branch.branch in history for branch in watch.state.history.branches] == [True, True]
    assert '"train"' in text(timeline_page(watch.state))
    assert "--compare" in text(compare_page([watch]))


def test_a_sample_tells_its_way_and_a_group_its_members(watch: RunWatch) -> None:
    (row,) = watch.index.page(
        SampleQuery(
            conditions=(Condition("state", "equals", ("trained",)),), order=(("sample_index", "ascending"),), limit=1
        )
    ).rows
    page = text(Callbacks([watch]).page(f"/sample/{row['sample_index']}"))
    assert f"prompts.jsonl:{row['group_index'] + 1}, epoch 0" in page
    assert "optimizer step" in page
    assert (
        "policy version 1, log-probability -0.5000, the trainer's -0.7500, gap -0.2500, trained, advantage 0.5" in page
    )
    assert row["mean_gap"] == 0.1875
    assert "0.1875 nats a token in the mean" in page
    assert text(group_page(watch, row["group_index"])).count('"className": "member"') == 2
    assert "There is no sample 9999" in text(Callbacks([watch]).page("/sample/9999"))


def test_a_sample_whose_gap_is_not_known_says_why(watch: RunWatch) -> None:
    pending, trained = (
        watch.index.page(SampleQuery(conditions=(Condition("state", "equals", (state,)),), limit=1)).rows[0]
        for state in ("pending", "trained")
    )
    assert pending["mean_gap"] is None
    callbacks = Callbacks([watch])
    assert "no step that counts has trained it" in text(callbacks.page(f"/sample/{pending['sample_index']}"))
    index, batch = trained["sample_index"], trained["rollout"]
    for path in (watch.location.token_log / str(batch)).iterdir():
        path.write_bytes(b"torn")
    assert f"token_log/{batch}/" in text(callbacks.page(f"/sample/{index}"))
    shutil.rmtree(watch.location.token_log)
    assert "or they were reclaimed" in text(callbacks.page(f"/sample/{index}"))


def test_colours_are_changed_without_reading_the_sample_again(watch: RunWatch) -> None:
    (row,) = watch.index.page(SampleQuery(conditions=(Condition("state", "equals", ("trained",)),), limit=1)).rows
    path, callbacks = f"/sample/{row['sample_index']}", Callbacks([watch])
    by_version = text(callbacks.page(path))
    assert "There is no sample 9999" in text(Callbacks([watch]).recolour("advantage", "/sample/9999"))
    shutil.rmtree(watch.location.pool)
    by_gap = text(callbacks.recolour("gap to the trainer", path))
    assert "rgba(220,38,38,0.350)" in by_gap
    assert "rgba(220,38,38,0.350)" not in by_version
    with pytest.raises(SettingsError, match="allowed: policy version"):
        callbacks.recolour("rainbow", path)


def test_a_damaged_token_log_is_named_and_hides_no_sample(made: Path, tmp_path: Path) -> None:
    run = copy_run(made, tmp_path / "run")
    for path in (run / "token_log" / "0").iterdir():
        path.write_bytes(b"torn")
    watch = RunWatch(locate_run(run), "run", tmp_path)
    watch.refresh_samples()
    assert any("token_log/0/" in problem for problem in watch.state.problems)
    assert watch.index.page(SampleQuery(conditions=(Condition("mean_gap", "notBlank"),))).num_matching > 0
    watch.close()


def test_a_run_that_can_not_be_read_says_so_and_is_read_again_later(watch: RunWatch) -> None:
    journal = next((watch.location.pool / "queues").glob("*/control/journal.log"))
    content = journal.read_bytes()
    journal.write_bytes(content[:100] + bytes(200) + content[300:])
    watch.refresh_queue()
    assert any("journal" in problem for problem in watch.state.problems)
    journal.write_bytes(content)
    watch.refresh_queue()
    assert watch.state.problems == []


def test_looking_changes_nothing_in_the_run_and_leaves_no_index_behind(made: Path, tmp_path: Path) -> None:
    run = copy_run(made, tmp_path / "run")
    before = snapshot(run)
    with watching([locate_run(run)]) as (watch,):
        watch.refresh_queue()
        folder = watch.index.path.parent
        assert folder.is_dir()
    assert main(["report", str(run), "--output", str(tmp_path / "report.html")]) == 0
    assert snapshot(run) == before
    assert not folder.exists()


def test_a_stall_is_named_on_the_first_page_until_a_batch_is_trained(watch: RunWatch) -> None:
    chain = "step 2 waits for 3 groups <- 2 in reward, oldest 94 s: slow_judge"
    path = watch.location.root / "stalls.jsonl"
    last = watch.state.metrics.steps[-1]
    line = json.dumps({"time_s": last.time_s + 60, "quiet_s": 94.0, "words": chain}) + "\n"
    path.write_text(line + line[:20])
    watch.refresh_metrics()
    assert "slow_judge" in text(overview(watch.state))
    assert '"stall"' in text(timeline_page(watch.state))
    with (watch.location.root / "metrics.jsonl").open("ab") as metrics:
        metrics.write(msgspec.json.encode(step_record(9, time_s=last.time_s + 90)) + b"\n")
    watch.refresh_metrics()
    assert "slow_judge" not in text(overview(watch.state))
    path.write_text("{}\n")
    watch.refresh_metrics()
    assert any("stalls.jsonl:1" in problem for problem in watch.state.problems)


def test_a_server_on_loopback_answers_no_other_name(watch: RunWatch) -> None:
    server = viewer_server([watch], "127.0.0.1", 0)
    try:
        client = Client(server.app)
        assert client.get("/", headers={"Host": "127.0.0.1:8433"}).status_code == 200
        assert client.get("/", headers={"Host": "elsewhere.example"}).status_code == 400
        with pytest.raises(SettingsError, match="can't be listened on"):
            viewer_server([watch], "127.0.0.1", server.port)
    finally:
        server.server_close()
    assert threading.active_count() < 20


def test_a_report_holds_its_plots_and_escapes_what_a_run_says(watch: RunWatch, tmp_path: Path) -> None:
    run = watch.location.root
    write_metrics(run / "metrics.jsonl", [step_record(0, dropped={"</script><b>bad": 50})])
    assert main(["report", str(run), "--output", str(tmp_path / "report.html")]) == 0
    content = (tmp_path / "report.html").read_text()
    assert "<b>bad" not in content
    figures = content.partition('id="figures">')[2].partition("</script>")[0]
    assert json.loads(figures)["drops"]["data"][0]["name"] == "</script><b>bad"
    assert "src=" not in content.partition("<body>")[2]


def test_a_folder_that_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", str(tmp_path)]) == 1
    assert "holds no run" in capsys.readouterr().err
    assert main(["view", str(tmp_path / "none")]) == 1
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.parametrize(("command", "module", "package"), [("view", "server", "dash"), ("report", "report", "jinja2")])
def test_an_installation_without_the_pages_packages_names_the_extra(
    made: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    command: str,
    module: str,
    package: str,
) -> None:
    for name in (f"vime.view.{module}", "vime.view.app"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, package, None)
    assert main([command, str(made)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("Loading the pages.\n"), "it may take some seconds"
    assert "pip install '.[view]'" in told.err
    assert not told.out, "the address comes first there"
