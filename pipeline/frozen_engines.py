"""Engines whose weights nobody changes: fenced and readmitted without a publication."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

from pipeline.engine_health import Fences


class FrozenEngines:
    """The engines of one model that isn't trained."""

    moment: int | None = 0

    def __init__(
        self,
        addresses: Collection[str],
        serve_only: Callable[[Collection[str]], Awaitable[None]],
        runs_anew: Callable[[str, str], Awaitable[None]],
        tell_fenced: Callable[[Mapping[str, str]], None],
    ) -> None:
        """`serve_only` has the model's router send requests to these of its engines alone.

        `runs_anew` is told where an engine was and is, before it gets requests; `tell_fenced` which engines get none,
        and why, when that changes.
        """
        self._serving, self._serve_only, self._runs_anew = set(addresses), serve_only, runs_anew
        self._tell_fenced = tell_fenced
        self._fenced: dict[str, str] = {}

    async def fence(self, address: str, reason: str) -> None:
        """Send no more requests to the engine."""
        self._serving.discard(address)
        self._fenced[address] = reason
        self._tell_fenced(self._fenced)
        await self._serve_only(self._serving)

    async def give_up(self, address: str) -> None:
        """The engine never comes back; it serves nothing already."""

    async def readmit(self, address: str, now_at: str) -> None:
        """The engine runs anew, with the weights that it always has."""
        await self._runs_anew(address, now_at)
        self._serving.add(now_at)
        await self._serve_only(self._serving)
        del self._fenced[address]
        self._tell_fenced(self._fenced)


class FencesOfModels:
    """Sends each engine's word to where its model is fenced."""

    def __init__(
        self, trained: Fences, others: Mapping[str, Fences], on_move: Callable[[str, str], Awaitable[None]]
    ) -> None:
        """`others` by the addresses of engines that aren't trained; `on_move` is told of another address."""
        self._trained, self._others, self._on_move = trained, dict(others), on_move

    @property
    def moment(self) -> int | None:
        return self._trained.moment

    async def fence(self, address: str, reason: str) -> None:
        await self._others.get(address, self._trained).fence(address, reason)

    async def give_up(self, address: str) -> None:
        await self._others.get(address, self._trained).give_up(address)

    async def readmit(self, address: str, now_at: str) -> None:
        fences = self._others.get(address, self._trained)
        if now_at != address:
            if address in self._others:
                self._others[now_at] = self._others.pop(address)
            await self._on_move(address, now_at)
        await fences.readmit(address, now_at)
