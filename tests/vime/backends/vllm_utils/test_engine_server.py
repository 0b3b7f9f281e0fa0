"""Starting and ending an engine."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from tests.support.tiny_models import VOCAB_SIZE, build_tokenizer
from tests.vime.backends.vllm_utils.publications import Publisher, Weights, transformers_reference
from vime.backends.vllm_utils import server as server_module
from vime.backends.vllm_utils.client import EngineClient
from vime.backends.vllm_utils.launch import EngineCommand, EngineLaunch
from vime.backends.vllm_utils.protocol import GenerateRequest, Sampling
from vime.backends.vllm_utils.sender import WeightSender
from vime.backends.vllm_utils.server import EngineServer
from vime.backends.vllm_utils.startup_log import IMPORTING, last_lines, startup_phase
from vime.backends.vllm_utils.supervisor import descendants, mapped_segments
from vime.backends.vllm_utils.weight_folder import read_weight_folder, weight_names
from vime.errors import EngineStartError


def launch(folder: Path, checkpoint: Path, port: int = 0, *extra: str) -> EngineLaunch:
    return EngineLaunch(checkpoint, "127.0.0.1", port, folder / "logs" / "engine.log", "test", extra_args=extra)


def test_a_taken_port_is_named_with_what_to_do(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(
            EngineStartError, match=rf"can't listen on 127\.0\.0\.1:{port}: .*Stop the program that uses"
        ):
            EngineServer(launch(tmp_path, tmp_path, port)).start()


def test_a_server_that_was_not_started_says_so(tmp_path: Path) -> None:
    server = EngineServer(launch(tmp_path, tmp_path))
    server.stop()
    with pytest.raises(EngineStartError, match=r"Call start\(\) first"):
        server.poll()


@pytest.mark.multiproc
def test_an_engine_is_found_ready_whatever_proxy_the_environment_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "health").touch()

    def serve_files(wanted: EngineLaunch) -> EngineCommand:
        words = ["-m", "http.server", str(wanted.port), "--bind", wanted.host, "--directory", str(tmp_path)]
        return EngineCommand((sys.executable, *words), {})

    monkeypatch.setattr(server_module, "engine_command", serve_files)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    with EngineServer(launch(tmp_path, tmp_path)) as server:
        server.wait_ready(timeout_s=20)


def test_the_log_tells_the_phase() -> None:
    assert startup_phase("") == IMPORTING
    assert startup_phase("INFO non-default args: {}") == "starting the engine process"
    assert startup_phase("INFO non-default args\nINFO Starting to load model /m ...") == "loading weights"
    assert startup_phase("Starting to load model\nINFO:     Application startup complete.") == "listening"


def test_last_lines_skip_empty_ones_and_missing_files(tmp_path: Path) -> None:
    assert last_lines(tmp_path / "none") == []
    (tmp_path / "log").write_text("".join(f"line {i}\n\n" for i in range(50)))
    assert last_lines(tmp_path / "log", 3) == ["line 47", "line 48", "line 49"]


def test_only_the_end_of_a_large_log_is_read(tmp_path: Path) -> None:
    with (tmp_path / "log").open("wb") as log:
        log.truncate(2**30)
        log.seek(0, 2)
        log.write(b"\nthe last words\n")
    tracemalloc.start()
    assert last_lines(tmp_path / "log", num_lines=1) == ["the last words"]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**22


@pytest.mark.slow
@pytest.mark.engine
def test_an_engine_without_its_checkpoint_shows_its_last_log_lines(tmp_path: Path) -> None:
    phases: list[str] = []
    with (
        EngineServer(launch(tmp_path, tmp_path / "missing")) as server,
        pytest.raises(EngineStartError) as error,
    ):
        server.wait_ready(lambda phase, _seconds: phases.append(phase), timeout_s=100)
    text = str(error.value)
    assert "ended with status 1 after" in text
    assert "Last log lines:\n  | " in text
    assert text.endswith(f"Give an existing checkpoint folder: {tmp_path / 'missing'} does not exist.")
    assert phases[0] == IMPORTING


LAUNCHER = """
import sys, time
from pathlib import Path
from vime.backends.vllm_utils.launch import EngineLaunch
from vime.backends.vllm_utils.server import EngineServer
server = EngineServer(EngineLaunch(Path(sys.argv[1]), "127.0.0.1", 0, Path(sys.argv[2]), "test"))
server.start()
server.wait_ready(timeout_s=200)
print(server.address, flush=True)
time.sleep(600)
"""


def mixture_of_experts(folder: Path, seed: int) -> Weights:
    """A new tiny mixture-of-experts checkpoint in `folder`, as named tensors."""
    config = Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=False,
        initializer_range=0.2,
    )
    torch.manual_seed(seed)
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
    build_tokenizer(folder)
    return list(read_weight_folder(folder, weight_names(folder)))


@dataclass
class Launched:
    """A process that launched an engine, and what the engine was launched with."""

    process: subprocess.Popen[str]
    address: str
    first: Path
    second: Weights


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launched]:
    """A launcher with a ready engine of a mixture-of-experts model."""
    folder = tmp_path_factory.mktemp("launched")
    mixture_of_experts(folder / "first", 0)
    second = mixture_of_experts(folder / "second", 1)
    argv = [sys.executable, "-c", LAUNCHER, str(folder / "first"), str(folder / "engine.log")]
    process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield Launched(process, process.stdout.readline().strip(), folder / "first", second)
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(240)
async def test_experts_compute_with_the_published_weights(launched: Launched) -> None:
    prompt, sampling = [5, 6, 7, 8], Sampling(16, temperature=0.0, ignore_eos=True)
    async with EngineClient(launched.address) as client:
        with WeightSender("127.0.0.1", 0, 2, timeout_s=20.0) as sender:
            publisher = Publisher(client, sender)
            await publisher.join()
            await publisher.publish(launched.second)
            result = await client.generate(GenerateRequest("moe", prompt, sampling))
            folder = launched.first.with_name("second")
            assert result.token_ids == transformers_reference(folder)([], prompt, 16)


@pytest.mark.slow
@pytest.mark.engine
@pytest.mark.timeout(240)
def test_a_killed_launcher_leaves_no_process_and_no_shared_memory(launched: Launched) -> None:
    processes = descendants(launched.process.pid)
    assert len(processes) >= 3
    segments = mapped_segments(processes)
    assert segments
    launched.process.kill()
    launched.process.wait()
    deadline = time.monotonic() + 15
    while any(Path(f"/proc/{pid}").exists() for pid in processes) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in processes if Path(f"/proc/{pid}").exists()]
    assert not [path for path in segments if Path(path).exists()]
