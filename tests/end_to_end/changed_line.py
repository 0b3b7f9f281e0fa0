"""A folder for PYTHONPATH from which one line of one module of vime reads otherwise."""

from __future__ import annotations

from pathlib import Path

_SITE = """
import importlib.machinery
import sys

MODULE, OLD, NEW = {module!r}, {old!r}, {new!r}


class ChangedLoader(importlib.machinery.SourceFileLoader):
    def get_code(self, name):
        source = self.get_data(self.path).decode()
        if source.count(OLD) != 1:
            raise ImportError(f"{{name}} has {{source.count(OLD)}} lines {{OLD!r}}, expected one")
        return compile(source.replace(OLD, NEW), self.path, "exec")


class Finder:
    @staticmethod
    def find_spec(name, path, target=None):
        if name != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        spec.loader = ChangedLoader(name, spec.origin)
        return spec


sys.meta_path.insert(0, Finder)
"""


def changed_line(folder: Path, module: str, old: str, new: str) -> Path:
    """Write the folder; every Python process that has it on its path sees `new` in place of `old`."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(_SITE.format(module=module, old=old, new=new))
    return folder
