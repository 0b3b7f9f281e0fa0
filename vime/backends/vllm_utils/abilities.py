"""What an engine can do, as it says itself."""

from __future__ import annotations

import asyncio

import msgspec

from vime.backends.vllm_utils import wire_032 as wire
from vime.backends.vllm_utils.engine_http import EngineHttp, RouteNotFound
from vime.backends.vllm_utils.protocol import EngineCapabilities
from vime.backends.vllm_utils.wire_columns import SAMPLE, SampleAbilities
from vime.versions import version_at_least


class EngineAbilities:
    """Asks one engine. What its sample route returns is asked for until there is an answer, which then is kept."""

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._asking = asyncio.Lock()
        self._has_asked = False
        self._of_samples: SampleAbilities | None = None

    async def of_samples(self) -> SampleAbilities | None:
        """What the engine's sample route returns; None without one."""
        async with self._asking:
            if not self._has_asked:
                self._of_samples = await self._ask()
                self._has_asked = True
        return self._of_samples

    async def keep_version(self) -> bool:
        """Whether the label of the weights is the plug-in's."""
        abilities = await self.of_samples()
        return abilities is not None and abilities.keeps_version

    async def swap(self) -> bool:
        """Whether weights can change between two steps."""
        abilities = await self.of_samples()
        return abilities is not None and abilities.swaps

    async def world_size(self) -> int:
        """Workers of the engine; 1 where it doesn't say."""
        try:
            return int((await self._http.json("GET", "/get_world_size"))["world_size"])
        except RouteNotFound:
            return 1

    async def all(self) -> EngineCapabilities:
        """Everything, asked anew but for the sample route."""
        version = str((await self._http.json("GET", "/version"))["version"])
        models = (await self._http.json("GET", "/v1/models"))["data"]
        api = await self._http.json("GET", "/openapi.json")
        routes = set(api["paths"])
        request_fields = api.get("components", {}).get("schemas", {}).get("GenerateRequest", {}).get("properties", {})
        abilities = await self.of_samples()
        columns = abilities or SampleAbilities(0, False, False, False)
        return EngineCapabilities(
            engine_version=version,
            model=str(models[0]["id"]),
            max_model_len=int(models[0].get("max_model_len") or 0),
            world_size=await self.world_size(),
            token_in_generate=wire.GENERATE in routes,
            pause_keep="/pause" in routes,
            version_spans=abilities is not None or version_at_least(version, (0, 32)),
            cache_salt="cache_salt" in request_fields,
            weight_transfer="/update_weights" in routes,
            columns=abilities is not None,
            max_candidates=columns.max_candidates,
            routed_experts=columns.routes,
            nucleus=columns.nucleus,
            sleep="/sleep" in routes and "/wake_up" in routes,
        )

    async def _ask(self) -> SampleAbilities | None:
        try:
            body = await self._http.call("GET", SAMPLE)
        except RouteNotFound:
            return None
        return msgspec.json.decode(body, type=SampleAbilities)
