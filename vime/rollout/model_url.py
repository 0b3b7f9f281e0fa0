"""Where a user's function finds the engines of a model."""

from __future__ import annotations

from typing import Any

from vime.errors import NoRouterError


def get_model_url(args: Any, model_name: str, endpoint: str = "/inference/v1/generate") -> str:
    """URL of `endpoint` at the router of a served model; "/v1/chat/completions" and the like work too.

    `args` is what hooks get. Send `x-session-id` with requests that belong together, so that one engine serves them.

    Raises:
        NoRouterError: no such model is served in this run, or none has a router.
    """
    routers = args.vllm_model_routers
    if model_name not in routers:
        raise NoRouterError(
            f"No router serves a model named {model_name!r}; there is {', '.join(map(repr, routers)) or 'none'}.",
            next_step="Use a name of --vllm-config, or 'default' in a run without that file.",
        )
    host, port = routers[model_name]
    return f"http://{host}:{port}{endpoint}"
