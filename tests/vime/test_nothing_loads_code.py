"""What is read from a disk or another process never runs code: held over the source of all packages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path for package in ("vime", "storage", "recovery", "pipeline") for path in (ROOT / package).rglob("*.py")
)
RUN_CODE = {"cloudpickle", "dill", "joblib", "marshal", "shelve"}
TORCHS_OWN_FORMAT = "vime/backends/megatron_utils/torch_dist_files.py"
"""Its table of contents is a pickle by definition: read by an unpickler that knows the format's classes alone."""


WORDS = re.compile(r"pickle|dill|joblib|marshal|shelve|\b(eval|exec)\(|torch\.load|yaml\.|trust_remote_code")
"""What a fault can't do without: a module with none of them needs no closer look."""


def faults(source: str, path: str = "ours.py") -> Iterator[str]:
    """What in a module can run the code of a file that it reads."""
    if not WORDS.search(source):
        return
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names):
                yield from (alias.name for alias in names if alias.name.partition(".")[0] in RUN_CODE)
            case ast.ImportFrom(module=module) if (module or "").partition(".")[0] in {*RUN_CODE, "pickle"}:
                yield f"from {module}"
            case ast.Attribute(ast.Name("pickle"), name) if name != "UnpicklingError" and path != TORCHS_OWN_FORMAT:
                yield f"pickle.{name}"
            case ast.Call(ast.Name("eval" | "exec" as name)):
                yield f"{name}()"
            case ast.Call(ast.Attribute(ast.Name("torch"), "load"), keywords=given):
                if not any(word.arg == "weights_only" and ast.unparse(word.value) == "True" for word in given):
                    yield "torch.load without weights_only=True"
            case ast.Call(ast.Attribute(ast.Name("yaml"), "load" | "unsafe_load" | "full_load" as name)):
                yield f"yaml.{name}"
            case ast.Call(keywords=given):
                for word in given:
                    if word.arg in ("allow_pickle", "trust_remote_code") and ast.unparse(word.value) != "False":
                        yield f"{word.arg}={ast.unparse(word.value)}"
            case _:
                pass


def test_no_module_of_ours_can_run_what_it_reads() -> None:
    assert len(SOURCES) > 400
    found = {
        (name, fault)
        for path in SOURCES
        for name in [str(path.relative_to(ROOT))]
        for fault in faults(path.read_text(), name)
    }
    assert found == set()


@pytest.mark.parametrize(
    "source",
    [
        "import cloudpickle",
        "from pickle import loads",
        "import pickle\npickle.loads(b'')",
        "eval('1')",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text)",
        "AutoModel.from_pretrained(path, trust_remote_code=given)",
    ],
)
def test_what_would_run_code_is_found(source: str) -> None:
    assert list(faults(source))


def test_what_runs_none_is_let_be() -> None:
    assert not list(faults("import pickle\ntry: torch.load(p, weights_only=True)\nexcept pickle.UnpicklingError: pass"))
    assert not list(faults("model.eval()\nyaml.safe_load(text)\nnp.load(p, allow_pickle=False)"))
