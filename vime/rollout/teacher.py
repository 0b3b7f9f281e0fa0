"""A teacher in an engine of someone else's: it scores each sample's response when it is generated (--opd-type vllm)."""

from __future__ import annotations

from urllib.parse import urlsplit

from vime.backends.vllm_utils.client import EngineClient
from vime.errors import SettingsError
from vime.utils.types import Sample


class EngineTeacher:
    """Asks one vLLM server, whose model reads the same token ids as the one that is trained."""

    def __init__(self, engine: EngineClient) -> None:
        self._engine = engine

    @classmethod
    def at(cls, url: str) -> EngineTeacher:
        """The server at `url`, whose path doesn't matter. Create it inside a running event loop; close it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SettingsError(f"--rm-url is {url!r}, allowed: http://HOST:PORT.", next_step="Correct the address.")
        return cls(EngineClient(f"{parts.scheme}://{parts.netloc}"))

    async def check(self) -> None:
        """Raise `EngineError` when nobody answers, `SettingsError` when the server takes no token ids."""
        found = await self._engine.capabilities()
        if not found.token_in_generate:
            raise SettingsError(
                f"--rm-url {self._engine.address}: vLLM {found.engine_version} takes no token ids, allowed: one with "
                "the route /inference/v1/generate.",
                next_step="Serve the teacher with a newer vLLM.",
            )

    async def score(self, sample: Sample) -> None:
        """Set `sample.teacher_log_probs`; raises `EngineError`."""
        sample.teacher_log_probs = await self._engine.score(sample.tokens, sample.prompt_length)

    async def close(self) -> None:
        await self._engine.close()
