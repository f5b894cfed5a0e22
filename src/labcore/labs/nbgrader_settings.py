"""nbgrader's settings, the same for `make labs`, `make grade` and the nbgrader command itself."""

from __future__ import annotations

import logging
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

__all__ = ["CELL_SECONDS", "STUB", "course_settings", "open_gradebook", "quiet_log"]

STUB = 'raise NotImplementedError("write this part")'
CELL_SECONDS = 60
GRADEBOOK = "gradebook.db"


def course_settings(root: Path, work: Path) -> dict[str, dict[str, Any]]:
    """The settings by nbgrader's class and name.

    root: the folder that holds `source/<slug>/<slug>.ipynb`. work: where nbgrader may write:
    its releases, submissions, graded copies, feedback and the gradebook.
    """
    folders = {
        f"{step}_directory": str(work / step)
        for step in ("release", "submitted", "autograded", "feedback")
    }
    return {
        "CourseDirectory": {
            "root": str(root),
            "source_directory": str(root / "source"),
            "db_url": f"sqlite:///{work / GRADEBOOK}",
            **folders,
        },
        "ClearSolutions": {"code_stub": {"python": STUB}},
        "ExecutePreprocessor": {
            "timeout": CELL_SECONDS,
            "interrupt_on_timeout": True,
            "extra_arguments": ["--IPKernelApp.log_level=ERROR"],
        },
        # A student's output may be HTML: nothing of it may run in the browser that shows feedback.
        "HTMLExporter": {"sanitize_html": True},
    }


def open_gradebook(work: Path) -> None:
    """Begins a gradebook below `work`, unless there is one, with the version of its tables.

    nbgrader would ask the program `alembic` for the version, which it finds only where PATH has
    the environment's folder.
    """
    from alembic.script import ScriptDirectory
    from nbgrader.dbutil import ALEMBIC_DIR  # type: ignore[import-untyped]

    with closing(sqlite3.connect(work / GRADEBOOK)) as book, book:
        if book.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
            return
        version = ScriptDirectory(ALEMBIC_DIR).get_current_head()
        book.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        book.execute("INSERT INTO alembic_version VALUES (?)", (version,))


def quiet_log(path: Path | None) -> logging.Logger:
    """A log of errors that goes to the file at path, or nowhere: never to the screen.

    nbgrader warns of every cell that `mend` puts back in its own form, which says nothing.
    """
    log = logging.Logger("nbgrader", logging.ERROR)
    log.addHandler(
        logging.NullHandler() if path is None else logging.FileHandler(path, encoding="utf-8")
    )
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return log
