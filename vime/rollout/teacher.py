"""A teacher in an engine of someone else's: it scores each sample's response when it is generated (--opd-type vllm)."""

from __future__ import annotations

from urllib.parse import urlsplit

from vime.backends.vllm_utils.client import EngineClient
from vime.errors import SettingsError
from vime.utils.types import Sample

_TRIED_TOKENS = 4


class EngineTeacher:
    """Asks one vLLM server, whose model reads the same token ids as the one that is trained."""

    def __init__(self, engine: EngineClient, temperature: float | None = None) -> None:
        """With a `temperature` each token is scored at it, by a request of its own; without, all in one at 1."""
        self._engine, self._temperature = engine, temperature

    @classmethod
    def at(cls, url: str, temperature: float | None = None) -> EngineTeacher:
        """The server at `url`, whose path doesn't matter. Create it inside a running event loop; close it."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise SettingsError(f"--rm-url is {url!r}, allowed: http://HOST:PORT.", next_step="Correct the address.")
        return cls(EngineClient(f"{parts.scheme}://{parts.netloc}"), temperature)

    async def check(self) -> None:
        """Raise `EngineError` when nobody answers, `SettingsError` when the server can't score as it is asked to."""
        found = await self._engine.capabilities()
        if not found.token_in_generate:
            raise SettingsError(
                f"--rm-url {self._engine.address}: vLLM {found.engine_version} takes no token ids, allowed: one with "
                "the route /inference/v1/generate.",
                next_step="Serve the teacher with a newer vLLM.",
            )
        if self._temperature not in (None, 1):
            await self._check_temperature(self._temperature)

    async def score(self, sample: Sample) -> None:
        """Set `sample.teacher_log_probs`; raises `EngineError`."""
        start = sample.prompt_length
        if self._temperature is None:
            sample.teacher_log_probs = await self._engine.score(sample.tokens, start)
        else:
            sample.teacher_log_probs = await self._engine.score_each(
                sample.tokens, start, temperature=self._temperature
            )

    async def close(self) -> None:
        await self._engine.close()

    async def _check_temperature(self, temperature: float) -> None:
        """A server that returns raw log-probabilities says the same at every temperature."""
        tokens = [0] * (_TRIED_TOKENS + 1)
        asked, plain = [await self._engine.score_each(tokens, 1, temperature=value) for value in (temperature, 1.0)]
        if asked == plain:
            raise SettingsError(
                f"--rm-url {self._engine.address} scores at temperature {temperature} as at 1, allowed: a server with "
                "--logprobs-mode processed_logprobs.",
                next_step="Start the teacher's server with --logprobs-mode processed_logprobs.",
            )
