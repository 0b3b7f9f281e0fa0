"""How many groups may be begun now: as many as the run still needs, and not so many that they grow old."""

from __future__ import annotations

from pipeline.admission import AdmissionRules, most_untrained
from pipeline.branch_books import BranchBooks
from pipeline.coordinator_config import CoordinatorConfig
from pipeline.running_leases import RunningLeases


class LeaseRoom:
    """Counts one branch's groups in its books, and knows under which version its next batch can be planned."""

    def __init__(
        self, config: CoordinatorConfig, books: BranchBooks, leases: RunningLeases, highest_trained_version: int
    ) -> None:
        """`highest_trained_version` is that of the newest batch of any branch, 0 before the first."""
        self._config, self._books, self._leases = config, books, leases
        self._rules = AdmissionRules(config.max_groups, config.batch, config.max_staleness, config.newest_only)
        kept = config.kept if config.kept is not None and config.kept.num_trained == len(books.trained) else None
        self._next_version = highest_trained_version + 1 if kept is None else kept.policy_version
        """Newest policy version under which the next batch can be planned."""

    def trained(self, policy_version: int) -> None:
        """A batch was trained that was planned under this version."""
        self._next_version = max(self._next_version, policy_version + 1)

    def keep_version(self, policy_version: int) -> None:
        """The batch after the last one is planned under the same version: nothing was published between them."""
        self._next_version = policy_version

    def needed(self) -> int:
        """Groups to begin beyond those in flight until the run is complete; none where it isn't above 0."""
        missing = self._config.groups_wanted - len(self._books.trained) - self._books.num_waiting
        return missing + self._config.surplus - len(self._leases) if missing > 0 else 0

    def under(self, policy_version: int) -> int:
        """Groups that may be begun under this version, as `AdmissionRules` has it; none where it isn't above 0."""
        oldest = policy_version
        if self._rules.max_staleness is not None:
            oldest = self._books.oldest_version(self._leases.oldest_version(policy_version))
        most = most_untrained(
            self._rules,
            oldest_version=oldest,
            begun_version=policy_version,
            next_version=max(self._next_version, policy_version),
        )
        return most - self._books.num_waiting - len(self._leases)
