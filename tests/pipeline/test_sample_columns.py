"""What the objective needs of each token is asked for, checked, stored, and there again when the trainer reads it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from pipeline.actors import engine as engine_actor
from pipeline.actors.settings import encode_settings
from pipeline.candidates import candidate_needs
from pipeline.engine_wiring import build_engine_server
from pipeline.enqueue_needs import enqueue_needs
from pipeline.messages import encode
from pipeline.node_devices import ProcessPlace
from pipeline.run_folder import RunFolder
from pipeline.sample_columns import sample_columns
from storage.checks import EnqueueRequirements
from storage.columns import decode_group
from storage.pool import Pool
from storage.route_checks import RouteShape
from tests.pipeline.stream_parts import stream
from tests.pipeline.test_enqueue_needs import MOE
from tests.support.standin_engine import StandinEngine
from vime.backends.vllm_utils.protocol import NO_COLUMNS, SampleColumns
from vime.errors import EngineStartError
from vime.settings.parse import parse_settings
from vime.settings.rules.quantities import own_engines

pytestmark = pytest.mark.usefixtures("quick_retries")

_FLAGS = {
    "": SampleColumns(),
    "--use-score-centering --score-centering-top-k 7": SampleColumns(num_candidates=7),
    "--rollout-top-p 0.9": SampleColumns(nucleus=True),
    "--use-score-centering --rollout-top-p 0.9": SampleColumns(nucleus=True),
    "--use-rollout-routing-replay --use-score-centering": SampleColumns(num_candidates=128, routes=True),
}


@pytest.mark.parametrize("words", _FLAGS)
def test_engines_return_what_the_queue_checks_and_the_trainer_reads(words: str) -> None:
    settings = parse_settings(words.split())
    columns, checked, read = sample_columns(settings), enqueue_needs(settings, MOE), candidate_needs(settings)
    assert columns == _FLAGS[words]
    assert columns.num_candidates == (checked.sc_top_k or 0) == (read.top_k or 0)
    assert columns.nucleus == checked.top_p == read.nucleus
    assert columns.routes == (checked.routes is not None)


def test_an_engine_is_started_for_the_columns_of_its_run(tmp_path: Path) -> None:
    words = f"--save {tmp_path} --hf-checkpoint {tmp_path} --use-score-centering --score-centering-top-k 40"
    settings = parse_settings(words.split())
    trained, frozen = own_engines(settings)[0], replace(own_engines(settings)[0], is_trained=False)
    for spec, columns in ((trained, SampleColumns(num_candidates=40)), (frozen, NO_COLUMNS)):
        assert build_engine_server(settings, RunFolder.of(settings), 0, spec).launch.columns == columns


@dataclass
class RunningServer:
    """In the place of an `EngineServer` whose engine answers already."""

    address: str

    def start(self, **_: object) -> None: ...

    def wait_ready(self, _on_progress: object) -> float:
        return 0.0


@pytest.mark.parametrize(("has_columns", "starts"), [(True, True), (False, False)])
async def test_a_run_whose_engine_lacks_what_it_needs_ends_at_the_start(
    tmp_path: Path, engine: StandinEngine, monkeypatch: pytest.MonkeyPatch, has_columns: bool, starts: bool
) -> None:
    engine.has_columns = has_columns
    monkeypatch.setattr(engine_actor, "build_engine_server", lambda *_, **__: RunningServer(engine.address))
    monkeypatch.setattr(engine_actor, "log_to_file", lambda _path: None)
    words = f"--save {tmp_path} --use-score-centering --score-centering-top-k 4"
    settings = parse_settings(words.split())
    what = encode((own_engines(settings)[0], [ProcessPlace("node", "127.0.0.1")]))
    actor = engine_actor.EngineActor(encode_settings(settings), 0, what)
    if starts:
        assert await actor.start() == engine.address
    else:
        with pytest.raises(EngineStartError, match="can't return 4 candidates of each token"):
            await actor.start()


@pytest.mark.parametrize(
    ("columns", "needs", "names"),
    [
        (
            SampleColumns(num_candidates=4, routes=True),
            EnqueueRequirements(routes=RouteShape(2, 2, 4), sc_top_k=4),
            {"top_k_ids", "top_k_log_probs", "routes"},
        ),
        (
            SampleColumns(nucleus=True),
            EnqueueRequirements(top_p=True),
            {"top_p_ids", "top_p_offsets", "top_p_log_probs"},
        ),
    ],
)
async def test_columns_of_an_engine_pass_the_checks_and_are_stored_with_the_group(
    tmp_path: Path,
    engine: StandinEngine,
    columns: SampleColumns,
    needs: EnqueueRequirements,
    names: set[str],
) -> None:
    async with stream(tmp_path, engine, groups_wanted=2, columns=columns, needs=needs) as parts:
        await parts.until_pending(2)
        groups = await parts.coordinator.wait_for_groups(2, 1)
        assert groups is not None
        with Pool.open(tmp_path / "pool") as pool:
            stored = pool.read_group(groups[0].ref)
    assert stored.columns.keys() >= names
    for sample in decode_group(stored.header, stored.columns):
        assert (sample.rollout_topk_token_ids is None) == (not columns.num_candidates)
        assert (sample.rollout_routed_experts is None) == (not columns.routes)
        assert (sample.rollout_top_p_token_ids is None) == (not columns.nucleus)
