"""Eight producers on two clients write at once: all records are there, and a pack has one writer at a time."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from storage.pool import Pool
from storage.refs import PoolRef
from tests.juicefs.two_mounts import TwoMounts

pytestmark = [pytest.mark.juicefs, pytest.mark.slow, pytest.mark.timeout(300)]
PRODUCERS, RECORDS, BATCH = 8, 1000, 100
WRITE = f"""
import sys, msgspec
from storage.pool import Pool
refs = []
with Pool.open(sys.argv[1]) as pool:
    for start in range(0, {RECORDS}, {BATCH}):
        payloads = [b"%s:%d" % (sys.argv[2].encode(), number) for number in range(start, start + {BATCH})]
        refs += pool.publish_prompts(payloads, submission_id=str(start))
sys.stdout.buffer.write(msgspec.msgpack.encode(refs))
"""


def write_all(roots: list[Path], environment: dict[str, str]) -> list[list[PoolRef]]:
    """References of every producer's records; producer n writes through the n-th root."""
    processes = [
        subprocess.Popen([sys.executable, "-c", WRITE, str(root), str(number)], env=environment, stdout=subprocess.PIPE)
        for number, root in enumerate(roots)
    ]
    outputs = [process.communicate(timeout=240)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(roots)
    return [msgspec.msgpack.decode(output, type=list[PoolRef]) for output in outputs]


def test_records_of_all_producers_on_both_clients_are_there(volume: TwoMounts) -> None:
    root = volume.new_folder() / "pool"
    with Pool.create(root, "run", profile="juicefs", declaration=volume.declaration) as pool:
        roots = [root, volume.at_peer(root)] * (PRODUCERS // 2)
        written = write_all(roots, volume.environment())
        for number, refs in enumerate(written):
            read = [pool.read_blob(ref) for ref in refs]
            assert read == [b"%d:%d" % (number, record) for record in range(RECORDS)]
        assert len({ref for refs in written for ref in refs}) == PRODUCERS * RECORDS


def test_a_writer_whose_packs_another_client_took_over_goes_on_in_a_pack_of_its_own(volume: TwoMounts) -> None:
    root = volume.new_folder() / "pool"
    with Pool.create(root, "run", profile="juicefs", declaration=volume.declaration) as pool:
        before = pool.publish_blob(b"before", submission_id="1")
        with Pool.open(volume.at_peer(root)) as other:
            other.store.retire_writer(Path(before.path).parent.name)
            taken_over = (other.root / before.path).read_bytes()
            after = pool.publish_blob(b"after", submission_id="2")
            assert after.path != before.path
            assert (other.root / before.path).read_bytes() == taken_over
            assert [other.read_blob(ref) for ref in (before, after)] == [b"before", b"after"]
