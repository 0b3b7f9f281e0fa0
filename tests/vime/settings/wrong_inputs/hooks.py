"""Hooks that can't be imported or called as documented."""

from tests.vime.settings.wrong_inputs.case import Case

_HOOKS = {
    "wrong_hooks.py": (
        "def plain(args, sample): ...\n"
        "async def too_many(args, sample, other): ...\n"
        "async def streaming(args, sample, sampling_params):\n    yield sample\n"
        "async def is_async(args, samples): ...\n"
        "def positional(pg_loss, log_probs): ...\n"
        "number = 3\n"
        "class Source:\n    def __init__(self, args): ...\n    def get_samples(self, n): ...\n"
    ),
    "broken_hooks.py": "1 / 0\n",
}


def _hook(words: str, found: str, allowed: str, next_step: str) -> Case:
    return Case(words, found, allowed, next_step, files=_HOOKS)


_CHANGE = "Change its definition."

CASES = (
    _hook("--custom-rm-path no_such_package.reward.score",
          "--custom-rm-path no_such_package.reward.score: ModuleNotFoundError: No module named 'no_such_package'",
          "a module no_such_package.reward that can be imported", "set PYTHONPATH."),
    _hook("--custom-rm-path wrong_hooks.absent", "--custom-rm-path wrong_hooks.absent: wrong_hooks has no 'absent'",
          "the name of a function there", "Correct the path."),
    _hook("--custom-rm-path broken_hooks.f", "--custom-rm-path broken_hooks.f: ZeroDivisionError",
          "a module broken_hooks that can be imported", "set PYTHONPATH."),
    _hook("--custom-generate-function-path wrong_hooks.plain",
          "--custom-generate-function-path wrong_hooks.plain is not async",
          "async def plain(args, sample, sampling_params)", _CHANGE),
    _hook("--custom-rm-path wrong_hooks.number", "wrong_hooks.number is int, not a function",
          "def number(args, sample)", _CHANGE),
    _hook("--custom-rm-path wrong_hooks.too_many",
          "can't be called as documented (missing a required argument: 'other')", "def too_many(args, sample)",
          _CHANGE),
    _hook("--custom-generate-function-path wrong_hooks.streaming", "yields (it is an async generator)",
          "async def streaming(args, sample, sampling_params)", _CHANGE),
    _hook("--dynamic-sampling-filter-path wrong_hooks.is_async", "is async, and its result would never be awaited",
          "def is_async(args, samples)", _CHANGE),
    _hook("--rollout-sample-hook-path wrong_hooks.plain", "can't be called as documented", "rollout_id, evaluation)",
          _CHANGE),
    _hook("--use-tis --custom-tis-function-path wrong_hooks.positional", "can't be called as documented",
          "def positional(*, args, pg_loss, train_log_probs", _CHANGE),
    _hook("--data-source-path wrong_hooks.Source", "has no add_samples, save, load, __len__",
          "class Source(args) with the methods get_samples", _CHANGE),
    _hook("--data-source-path wrong_hooks.plain", "wrong_hooks.plain is not a class", "class plain(args)", _CHANGE),
    _hook("--custom-megatron-init-path wrong_hooks.plain", "missing a required argument: 'sample'", "def plain(args)",
          _CHANGE),
)  # fmt: skip
