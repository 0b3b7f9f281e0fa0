"""The two servers that `up` starts when none are named: Redis for metadata, and a JuiceFS gateway as S3 endpoint."""

from __future__ import annotations

import http.client
import socket
from pathlib import Path
from urllib.parse import urlsplit

from deploy.juicefs.processes import end, own_environment, own_processes, remember, run, start, wait_ready
from deploy.juicefs.volume import LOOPBACK, NAME, Volume, choose_port

REDIS, GATEWAY = "redis", "gateway"
_ANSWER_S = 5.0


def redis_settings(volume: Volume) -> str:
    """`redis.conf`: every change is synced before it is acknowledged, nothing is ever evicted, loopback only."""
    return f"""\
bind {LOOPBACK}
port {volume.request.redis_port}
requirepass {volume.secret(REDIS)}
dir "{volume.redis}"
appendonly yes
appendfsync always
save ""
maxmemory-policy noeviction
daemonize no
set-proc-title no
"""


def redis_command(volume: Volume) -> list[str]:
    return ["redis-server", str(volume.redis / "redis.conf")]


def start_redis(volume: Volume) -> None:
    """Start Redis unless it runs."""
    if own_processes(volume.folder, REDIS):
        return
    volume.request.redis_port = choose_port(volume.request.redis_port)
    volume.save()
    volume.redis.mkdir(parents=True, exist_ok=True)
    settings = volume.redis / "redis.conf"
    settings.touch(mode=0o600)
    settings.write_text(redis_settings(volume))
    log = volume.log(REDIS)
    process = start(redis_command(volume), own_environment(volume.folder, REDIS, {}), log)
    wait_ready(process, "Redis", lambda: _is_up(volume), log)
    remember(volume.folder, REDIS)


def _is_up(volume: Volume) -> bool:
    try:
        return ask_redis(volume.meta_url, volume.secret(REDIS), "PING").endswith("+PONG\r\n")
    except OSError:
        return False


def ask_redis(url: str, password: str, *words: str) -> str:
    """The reply to one command, as Redis writes it (`redis://` only). Raises `OSError` when it can't be reached."""
    parts = urlsplit(url)
    with socket.create_connection((parts.hostname or LOOPBACK, parts.port or 6379), _ANSWER_S) as connection:
        commands = [["AUTH", password]] if password else []
        for command in [*commands, list(words)]:
            encoded = "".join(f"${len(word.encode())}\r\n{word}\r\n" for word in command)
            connection.sendall(f"*{len(command)}\r\n{encoded}".encode())
            reply = connection.recv(65536).decode(errors="replace")
        return reply


def gateway_commands(volume: Volume, juicefs: Path) -> tuple[list[str], list[str]]:
    """Format the gateway's own volume, and serve it as S3."""
    metadata = f"sqlite3://{volume.gateway}/meta.db"
    make = [str(juicefs), "format", "--storage", "file", "--bucket", f"{volume.gateway}/objects/"]
    serve = [
        str(juicefs), "gateway", "--no-usage-report", "--no-banner", "--multi-buckets", "--backup-meta", "0",
        "--metrics", f"{LOOPBACK}:0", "--log", str(volume.log(GATEWAY)), "--cache-dir", str(volume.gateway / "cache"),
        "--cache-size", "256M", metadata, f"{LOOPBACK}:{volume.request.gateway_port}",
    ]  # fmt: skip
    return [*make, "--trash-days", "0", metadata, f"{NAME}-gateway"], serve


def start_gateway(volume: Volume, juicefs: Path) -> None:
    """Start the S3 endpoint unless it runs."""
    if own_processes(volume.folder, GATEWAY):
        return
    volume.request.gateway_port = choose_port(volume.request.gateway_port)
    volume.save()
    volume.gateway.mkdir(parents=True, exist_ok=True)
    make, serve = gateway_commands(volume, juicefs)
    keys = {"MINIO_ROOT_USER": NAME, "MINIO_ROOT_PASSWORD": volume.secret(GATEWAY)}
    environment = own_environment(volume.folder, GATEWAY, keys)
    if not (volume.gateway / "meta.db").exists():
        run(make, environment)
    log = volume.log(GATEWAY)
    process = start(serve, environment, log)
    wait_ready(process, "The S3 gateway", lambda: _serves(volume), log)
    remember(volume.folder, GATEWAY)


def _serves(volume: Volume) -> bool:
    connection = http.client.HTTPConnection(LOOPBACK, volume.request.gateway_port, timeout=_ANSWER_S)
    try:
        connection.request("GET", "/minio/health/live")
        return connection.getresponse().status == 200
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


def stop_services(volume: Volume) -> None:
    """End both, the gateway first: it may still be writing for a mount, and Redis syncs its log when it ends."""
    for part in (GATEWAY, REDIS):
        end(volume.folder, part)
