"""The cache never holds more bytes than it may, and forgets what was used longest ago."""

from storage.byte_cache import ByteCache


def test_what_was_used_longest_ago_leaves_when_bytes_run_out() -> None:
    cache = ByteCache(100)
    for name in "ab":
        cache.put(name, name.upper(), 40)
    assert cache.get("a") == "A"
    cache.put("c", "C", 40)
    assert [cache.get(name) for name in "abc"] == ["A", None, "C"]
    assert cache.num_bytes == 80


def test_a_value_larger_than_the_cache_drives_nothing_out() -> None:
    cache = ByteCache(100)
    cache.put("a", "A", 60)
    cache.put("b", "B", 101)
    assert (cache.get("a"), cache.get("b"), cache.num_bytes) == ("A", None, 60)


def test_a_value_put_again_counts_once() -> None:
    cache = ByteCache(100)
    cache.put("a", "old", 60)
    cache.put("a", "new", 70)
    assert (cache.get("a"), cache.num_bytes) == ("new", 70)
