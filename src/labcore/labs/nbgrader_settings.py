"""nbgrader's settings, shared by `make labs`, `make grade` and the nbgrader command itself."""

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
    """The settings, by nbgrader class and name.

    root: the folder that holds `source/<slug>/<slug>.ipynb`. work: the folder for what nbgrader
    writes: releases, submissions, graded copies, feedback and the gradebook.
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
        # A student's output may be HTML; it must not run scripts when feedback is viewed.
        "HTMLExporter": {"sanitize_html": True},
    }


def open_gradebook(work: Path) -> None:
    """Starts a gradebook in `work`, unless there is one, and records its schema version.

    nbgrader would get the version from the program `alembic`, which it finds only if the
    environment's folder is on the PATH.
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
    """A log of errors that goes to the file at path or nowhere, never to the screen.

    It omits warnings: nbgrader issues one for every cell that `mend` restores.
    """
    log = logging.Logger("nbgrader", logging.ERROR)
    log.addHandler(
        logging.NullHandler() if path is None else logging.FileHandler(path, encoding="utf-8")
    )
    for handler in log.handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    return log
