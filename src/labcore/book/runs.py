"""Decides when a notebook must run again, and records where and when it last ran.

jupyter-cache keys an execution only by the notebook's code. Next to its database is
`labcore.json`. For each notebook it has the hardware and date of the run and a digest of the code,
the labcore modules that it imports, labcore's data files (records, claims) and the versions of the
libraries. If the digest differs, the cached execution is dropped and the page is read again.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import nbformat
from docutils import nodes
from jupyter_cache import get_cache
from jupyter_cache.base import CacheBundleIn
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import labcore
from labcore import device
from labcore.book import kernels
from labcore.records import hashes

__all__ = ["forget_changed", "open_cache", "remember_run", "run_key", "run_line", "run_missing"]

PACKAGE = Path(labcore.__file__).parent
# Not data: code is hashed separately, and how pages look does not change results.
NOT_DATA = {".py", ".pyc", ".js", ".css", ".html", ".typed"}


@functools.cache
def _surroundings() -> str:
    """A hash of labcore's data files and of the libraries' versions."""
    total = hashlib.sha256()
    for path in sorted(PACKAGE.rglob("*")):
        if path.is_file() and path.suffix not in NOT_DATA:
            total.update(path.relative_to(PACKAGE).as_posix().encode())
            total.update(path.read_bytes())
    total.update(json.dumps(device.versions(), sort_keys=True).encode())
    return total.hexdigest()[:16]


def run_key(notebook: Path) -> str:
    """The key of a notebook's execution; when it changes, the notebook must run again."""
    return f"{hashes.digest(notebook)}-{_surroundings()}"


def _memory(env: BuildEnvironment) -> Path | None:
    """`labcore.json` next to the execution cache; None if notebooks are not run."""
    config = getattr(env, "mystnb_config", None)
    if config is None or config.execution_mode != "cache":
        return None
    return Path(config.execution_cache_path) / "labcore.json"


def _read(memory: Path) -> dict[str, dict[str, str]]:
    """The remembered runs; an unreadable file counts as empty, so everything runs again."""
    try:
        found = json.loads(memory.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _notebooks(env: BuildEnvironment) -> dict[str, Path]:
    paths = {name: Path(env.doc2path(name)) for name in env.found_docs}
    return {name: path for name, path in sorted(paths.items()) if path.suffix == ".ipynb"}


@contextmanager
def open_cache(folder: Path) -> Iterator[Any]:
    """Opens jupyter-cache in a folder and closes its database afterwards."""
    cache = get_cache(folder)
    try:
        yield cache
    finally:
        cache.db.dispose()


def _drop_execution(cache_folder: Path, notebook: Path) -> None:
    with open_cache(cache_folder) as cache:
        try:
            record = cache.match_cache_notebook(nbformat.read(notebook, as_version=4))
        except KeyError:
            return
        cache.remove_cache(record.pk)


def forget_changed(
    _app: Sphinx, env: BuildEnvironment, *_added_changed_removed: set[str]
) -> list[str]:
    """Before reading: drops executions whose key changed; returns the pages to read again."""
    memory = _memory(env)
    if memory is None:
        return []
    known, again = _read(memory), []
    for name, path in _notebooks(env).items():
        if known.get(name, {}).get("key") != run_key(path):
            _drop_execution(memory.parent, path)
            again.append(name)
    return again


def run_missing(_app: Sphinx, env: BuildEnvironment, names: list[str]) -> None:
    """Before reading: runs the notebooks that the cache lacks, some at a time.

    One that fails is left to myst-nb, which runs it again and reports its error.
    """
    memory = _memory(env)
    if memory is None:
        return
    settings: Any = vars(env)["mystnb_config"]
    with open_cache(memory.parent) as cache:
        missing = []
        for path in (path for name, path in _notebooks(env).items() if name in names):
            if any(path.match(pattern) for pattern in settings.execution_excludepatterns):
                continue
            try:
                cache.match_cache_notebook(nbformat.read(path, as_version=4))
            except KeyError:
                missing.append(path)
        for path, ran in kernels.run_all(missing, seconds=settings.execution_timeout):
            if not isinstance(ran, Exception):
                cache.cache_notebook_bundle(
                    CacheBundleIn(ran, str(path)), check_validity=False, overwrite=True
                )


def remember_run(app: Sphinx, _doctree: nodes.document) -> None:
    """After reading a notebook that ran without error: saves its key, hardware and date."""
    env = app.env
    memory = _memory(env)
    execution = getattr(env, "nb_metadata", {}).get(env.docname, {}).get("exec_data")
    if memory is None or not execution or not execution["succeeded"]:
        return
    key = run_key(Path(env.doc2path(env.docname)))
    known = _read(memory)
    if known.get(env.docname, {}).get("key") == key:
        return
    machine = device.hardware()
    when = datetime.datetime.fromtimestamp(execution["mtime"], datetime.UTC)
    known[env.docname] = {
        "key": key,
        "hardware": machine.name
        if device.gpu_visible()
        else f"{machine.name}, {machine.cores} cores",
        "date": when.date().isoformat(),
    }
    memory.write_text(json.dumps(known, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def run_line(env: BuildEnvironment, docname: str) -> str:
    """ "<hardware>, <date>" of the page's last run; "" if the page runs nothing."""
    memory = _memory(env)
    run: dict[str, Any] = _read(memory).get(docname, {}) if memory is not None else {}
    return f"{run['hardware']}, {run['date']}" if run.keys() >= {"hardware", "date"} else ""
