"""The queue's folder as other nodes of the Ray cluster see it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import GetTimeoutError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from pipeline.doctor.check import Outcome
from pipeline.doctor.juicefs import juicefs_mount
from storage.folder_client import FolderClient
from storage.preflight import probe_space
from vime.errors import StorageError

CALL_TIMEOUT_S = 60.0


@dataclass(frozen=True)
class Node:
    """One node of the cluster."""

    id: str
    name: str
    """Its address, unless `ray start --node-name` gave it another."""
    host: str
    address: str

    def __str__(self) -> str:
        return f"{self.name} on {self.host}"


def other_nodes() -> list[Node]:
    """The live nodes of the connected cluster but this process's own."""
    here = ray.get_runtime_context().get_node_id()
    return [node for node in _live_nodes() if node.id != here]


def find_node(name: str) -> Node:
    """The node with this name, host name or address.

    Raises:
        StorageError: no live node has it, or several have.
    """
    nodes = _live_nodes()
    found = [node for node in nodes if name in (node.name, node.host, node.address)]
    if len(found) == 1:
        return found[0]
    raise StorageError(
        f"{len(found)} live nodes of the Ray cluster are called {name!r}; there are: {', '.join(map(str, nodes))}.",
        next_step="Name one node by its address; `ray status` lists them.",
    )


def _live_nodes() -> list[Node]:
    return [
        Node(node["NodeID"], node["NodeName"], node["NodeManagerHostname"], node["NodeManagerAddress"])
        for node in ray.nodes()
        if node["Alive"]
    ]


class FolderActor(FolderClient):
    """`FolderClient` in a process on another node."""

    def __init__(self) -> None:
        super().__init__(Path())

    def enter(self, folder: str) -> None:
        """Work in this folder from now on."""
        self.folder = Path(folder)

    def faults(self, folder: str, declaration: dict[str, Any] | None) -> list[str]:
        """What is wrong with the mount and its space as this node has them; empty when nothing is.

        A declaration makes it a JuiceFS mount.
        """
        path = Path(folder)
        if not path.is_dir():
            return [f"{folder} does not exist there"]
        wrong = [probe.found for probe in (probe_space(path),) if not probe.works]
        if declaration is not None:
            wrong += [check.found for check in juicefs_mount(path, declaration) if check.outcome is Outcome.FAIL]
        return wrong


class NodeClient:
    """A folder as a process on another node sees it; a `FileClient`. Use with `with`."""

    def __init__(self, node: Node) -> None:
        self._node = node
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        self._actor = ray.remote(num_cpus=0)(FolderActor).options(scheduling_strategy=strategy).remote()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        ray.kill(self._actor)

    def enter(self, folder: Path) -> Self:
        """Work in this folder from now on."""
        self._call("enter", str(folder))
        return self

    def faults(self, folder: Path, declaration: Mapping[str, Any] | None) -> list[str]:
        """What `FolderActor.faults` says."""
        found: list[str] = self._call("faults", str(folder), None if declaration is None else dict(declaration))
        return found

    def append(self, name: str, data: bytes, *, sync: bool) -> None:
        self._call("append", name, data, sync=sync)

    def close(self, name: str) -> None:
        self._call("close", name)

    def read(self, name: str, expected: bytes) -> bytes | None:
        content: bytes | None = self._call("read", name, expected)
        return content

    def read_once(self, name: str) -> bytes | None:
        content: bytes | None = self._call("read_once", name)
        return content

    def replace(self, name: str, data: bytes) -> None:
        self._call("replace", name, data)

    def create_exclusively(self, name: str) -> bool:
        return bool(self._call("create_exclusively", name))

    def try_lock(self, name: str) -> bool:
        return bool(self._call("try_lock", name))

    def is_locked(self, name: str) -> bool:
        return bool(self._call("is_locked", name))

    def unlock(self, name: str) -> None:
        self._call("unlock", name)

    def clock(self) -> float:
        return float(self._call("clock"))

    def _call(self, method: str, *arguments: Any, **options: Any) -> Any:
        """Raises `OSError` as the other node's file system did, or `StorageError` when the node doesn't answer."""
        try:
            return ray.get(getattr(self._actor, method).remote(*arguments, **options), timeout=CALL_TIMEOUT_S)
        except RayTaskError as error:
            if isinstance(error.cause, OSError):
                raise OSError(error.cause.errno, error.cause.strerror) from error
            raise
        except GetTimeoutError as error:
            raise StorageError(
                f"Node {self._node} did not finish `{method}` within {CALL_TIMEOUT_S:.0f} s.",
                next_step="Look at its mount: a dead client makes every access hang.",
            ) from error
        except RayError as error:
            raise StorageError(
                f"Node {self._node} can't be asked: {str(error).splitlines()[0]}",
                next_step="Check that Ray runs there and that vime is installed.",
            ) from error
