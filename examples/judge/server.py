"""The judge of the `judge` example: an HTTP server that scores reversed digits, and now and then is too busy."""

from __future__ import annotations

import argparse
import asyncio
import random
from pathlib import Path

from aiohttp import web

NUM_DIGITS = 5


def score(response: str, label: str) -> float:
    """Fraction of the places at which the response has the label's digit; 0 for a response that is too long."""
    if len(response) > len(label):
        return 0.0
    return sum(found == wanted for found, wanted in zip(response, label, strict=False)) / len(label)


def judge(busy_rate: float, rng: random.Random) -> web.Application:
    """An application that answers `POST /judge`; a request in `1 / busy_rate` with 503, as a judge under load does."""

    async def answer(request: web.Request) -> web.Response:
        if rng.random() < busy_rate:
            return web.Response(status=503, text="too busy", headers={"Retry-After": "0"})
        asked = await request.json()
        return web.json_response(score(str(asked["response"]), str(asked["label"])))

    app = web.Application()
    app.router.add_post("/judge", answer)
    return app


async def serve(port: int, address_file: Path, busy_rate: float) -> None:
    """Serve until cancelled; the address goes to a file once the server answers."""
    runner = web.AppRunner(judge(busy_rate, random.Random()))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    partial = address_file.with_suffix(".partial")
    partial.write_text(f"http://127.0.0.1:{runner.addresses[0][1]}/judge\n")
    partial.replace(address_file)
    await asyncio.Event().wait()


def main() -> None:
    """Command line: `python examples/judge/server.py --address-file FILE`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--address-file", type=Path, required=True, help="where the judge's address goes")
    parser.add_argument("--port", type=int, default=0, help="any free one when left out")
    parser.add_argument("--busy-rate", type=float, default=0.02, help="fraction of requests answered 503")
    args = parser.parse_args()
    asyncio.run(serve(args.port, args.address_file, args.busy_rate))


if __name__ == "__main__":
    main()
