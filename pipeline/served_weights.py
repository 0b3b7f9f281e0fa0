"""The weights that serve in a session: which version, and whether the trainer still holds them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Protocol

from pipeline.commits import Commits
from pipeline.incidents import IncidentLog
from pipeline.known_versions import TriedVersions, highest_known_version
from pipeline.memory_turns import MemoryTurns
from pipeline.publication import Publication
from pipeline.publisher import WeightPublisher
from pipeline.run_folder import RunFolder
from pipeline.session_start import Start
from pipeline.trainer_turns import TrainerTurns
from pipeline.weight_wiring import weight_transport
from pipeline.workers import Workers
from vime.backends.vllm_utils.client import EngineClient
from vime.errors import PublicationError
from vime.settings.groups import Settings


class VersionHolders(Protocol):
    """Those whose results are of one version."""

    @property
    def hold_versions(self) -> bool:
        """Whether a new version would mix with that of a result under way."""
        ...

    async def responses_are_there(self) -> None:
        """Return when they don't, at the latest after some time."""
        ...


class ServedWeights:
    """Has engines serve what the trainer holds, those that come back included."""

    def __init__(
        self,
        publisher: WeightPublisher,
        workers: Workers,
        commits: Commits,
        trainer: TrainerTurns,
        turns: MemoryTurns,
        note: Callable[[str], None],
        evaluations: VersionHolders,
        *,
        overlaps: bool = False,
    ) -> None:
        """`note` is told which engines get no requests, and which serve again.

        No new version comes under `evaluations`, while an engine answers them. `overlaps`: the next batch may be
        trained while a version is published.
        """
        self._publisher, self._workers, self._commits = publisher, workers, commits
        self._trainer, self._turns, self._note = trainer, turns, note
        self._evaluations = evaluations
        self._trainer_holds_them = False
        self._overlaps = overlaps
        self._under_way: asyncio.Task[Publication] | None = None
        self._ended: Publication | None = None
        """One that was waited for before `settle`."""
        self._planned_version, self._is_planned = 0, False

    @property
    def version(self) -> int:
        return self._publisher.version

    @property
    def is_publishing(self) -> bool:
        """Whether a version is published beside the training."""
        return self._under_way is not None

    @property
    def planning_version(self) -> int:
        """The version that the trainer holds, as far as it has one: that which serves, or is about to."""
        return max(self.version, self._planned_version) if self.is_publishing else self.version

    def plan_under(self) -> int:
        """The version under which the next batch is planned now; it stays so, whatever becomes of a publication."""
        self._is_planned = True
        return self.planning_version

    def check(self) -> None:
        """Raise what the publication that is under way has failed with."""
        if self._under_way is not None and self._under_way.done():
            self._under_way.result()

    @property
    def fenced(self) -> Mapping[str, str]:
        """Engines that get no requests -> why."""
        return self._publisher.fenced

    @property
    def behind(self) -> list[str]:
        """Engines that get no requests, though they could take a version."""
        return self._publisher.behind

    async def someone_is_behind(self) -> None:
        await self._publisher.someone_is_behind()

    def trainer_changed(self) -> None:
        """The trainer's weights are no longer those that serve."""
        self._trainer_holds_them = False

    async def publish(self) -> Publication:
        """Publish what the trainer holds, as a new version, once evaluations have what the engines still answer.

        Where trainer and engines take turns the trainer is out afterwards, and whoever may be asked is awake.
        """
        await self._evaluations_have_responses()
        async with self._commits.trainers_busy:
            publication = await self._publisher.publish()
        self._trainer_holds_them = publication.raised
        await self._turns.wake(self._publisher.serving)
        return publication

    async def _evaluations_have_responses(self) -> None:
        if self._publisher.serving:
            await self._evaluations.responses_are_there()

    async def _publish_held(self) -> Publication:
        """Producers begin groups for the version that serves, if a batch is still to be planned for one that failed.

        The copy's memory is the training's again as soon as it is sent.
        """
        await self._evaluations_have_responses()
        try:
            publication = await self._publisher.publish()
        except PublicationError:
            await self._workers.trainers.let_go_weights()
            raise
        await self._workers.trainers.let_go_weights()
        if not publication.raised and not self._is_planned:
            self._planned_version = self.version
            await self.keep()
        return publication

    async def publish_and_tell(self) -> Publication:
        """Between two batches."""
        publication = await self.publish()
        self._tell(publication)
        return publication

    async def begin_to_publish(self) -> Publication | None:
        """Between two batches. None when a copy is published while the trainer goes on; `settle` tells of it then."""
        async with self._commits.trainers_busy:
            is_held = self._overlaps and await self._workers.trainers.hold_weights()
        if not is_held:
            return await self.publish_and_tell()
        self._planned_version, self._is_planned = self._publisher.next_version, False
        self._trainer_holds_them = True
        self._under_way = asyncio.create_task(self._publish_held())
        return None

    async def settle(self) -> Publication | None:
        """Wait for the publication that is under way; None without one. Raises what it failed with.

        One that has ended since the last call, for the sake of an engine that came back, is told of here too.
        """
        if self._under_way is None:
            ended, self._ended = self._ended, None
            return ended
        try:
            publication = await self._under_way
        finally:
            self._under_way = None
        self._trainer_holds_them = self._trainer_holds_them and publication.raised
        self._tell(publication)
        return publication

    async def abandon(self) -> None:
        """Give up the publication that is under way; engines that it has changed get no requests."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.cancel()
            await asyncio.gather(under_way, return_exceptions=True)

    async def publish_of_new_trainer(self) -> None:
        """Publish what ranks hold that have started again; the next batch is planned under that version."""
        self._publisher.sender_is_new()
        publication = await self._workers.guarded(self.publish())
        await self.keep()
        await self._workers.record_processes()
        await self._trainer.release()
        self._tell(publication)

    async def bring_back(self) -> None:
        """Give engines that were replaced the version that serves; a new one to all where that can't be repeated.

        Where trainer and engines take turns, those that serve are not stopped for it: the next turn's publication
        brings the others back. While an evaluation needs the version that serves, those wait that it can't be given to.
        """
        if self.is_publishing:
            self._ended = await self.settle()
            if not self.behind:
                return
        if self._turns.engines_sleep:
            if self._publisher.serving:
                return
            await self._turns.give_to_trainer()
        publication = None
        if self._trainer_holds_them and self._publisher.repeats():
            async with self._commits.trainers_busy:
                publication = await self._publisher.catch_up()
        if (publication is None or self.behind) and not (self._evaluations.hold_versions and self._publisher.serving):
            await self._trainer.revive()
            publication = await self.publish()
            await self.keep()
            await self._trainer.release()
        await self._turns.wake(self._publisher.serving)
        if publication is not None:
            self._tell(publication)

    async def serve_on(self) -> None:
        """Where trainer and engines take turns, give those that serve the memory, and let requests start."""
        if serving := self._publisher.serving:
            await self._turns.serve(self.version, serving)

    async def keep(self) -> None:
        """The next batch is planned under the version that serves."""
        await self._workers.queue.keep_version(self.version)

    def _tell(self, publication: Publication) -> None:
        for address in publication.returned:
            self._note(f"Engine {address} serves again, with version {publication.version}.")
        for address, reason in publication.fenced.items():
            self._note(f"Engine {address} gets no requests until it confirms a version: {reason}")


def publications_overlap(settings: Settings, num_gpus: int) -> bool:
    """Whether the next batch may be trained while a version is published.

    Not where trainer and engines take turns, in generation and training or in memory, or where ranks end after a batch.
    """
    wish, cluster = settings.weights.update_weights_while_training, settings.cluster
    in_memory = cluster.colocate or cluster.engines_leave_memory
    in_turns = settings.queue.max_staleness == 0 or in_memory or cluster.release_train
    return not in_turns and (wish == "on" or (wish == "auto" and num_gpus > 0))


async def start_publisher(
    settings: Settings,
    folder: RunFolder,
    start: Start,
    workers: Workers,
    clients: Sequence[EngineClient],
    turns: MemoryTurns,
    kept_version: int | None,
    incidents: IncidentLog,
) -> WeightPublisher:
    """The publisher of a session. `kept_version` is the highest one of engines of the session before, where they live.

    Versions never go back: also those count that an abandoned session tried.
    """

    def tell_fenced(model: str, fenced: Mapping[str, str]) -> None:
        incidents.engines(model, fenced, {engine.address: engine.name for engine in workers.engines.processes})

    weights = settings.weights
    turns.replace_engine = None if workers.engines.keeper is None else workers.engines.keeper.replace
    publisher = WeightPublisher(
        clients,
        weight_transport(settings, workers.trainers),
        workers,
        start_version=await highest_known_version(folder, start, workers.queue, workers.trainers, kept_version),
        flush_interval=weights.flush_cache_interval,
        timeout_s=weights.update_weight_timeout,
        compare_first=weights.check_weight_update_equal and start.commit is None and kept_version is None,
        replace=turns.replace_engine,
        tell_fenced=partial(tell_fenced, workers.engines.trained_model),
        lend_to_engines=turns.lent_to_engines,
        note_tried=TriedVersions(folder.tried_version).note,
    )
    if kept_version is not None:
        publisher.sender_is_new()
    workers.keep_engines(publisher, turns.runs_anew, tell_fenced)
    return publisher
