"""Pages that the local server shows besides the book: build progress, differences, errors."""

import html
from pathlib import Path

from labcore.course.build import Progress

__all__ = ["inject", "page_of_differences", "page_of_progress", "problem_page"]

STYLE = """
:root { color-scheme: light dark; }
body { font: 1rem/1.5 system-ui, sans-serif; max-width: 50rem; margin: 2rem auto; padding: 0 1rem; }
pre { overflow-x: auto; padding: .75rem; border: 1px solid #8886; border-radius: .3rem; }
progress { width: 100%; height: 1.2rem; }
.same { opacity: .8; }
ins, del { text-decoration: none; }
pre ins, pre del { display: inline-block; min-width: 100%; }
ins { background: #2a93; }
del { background: #c333; }
h2 { font-size: 1rem; margin: 1.5rem 0 .3rem; }
"""


def _page(title: str, body: str, *, refresh: int | None = None) -> str:
    again = f'<meta http-equiv="refresh" content="{refresh}">' if refresh else ""
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
{again}
<title>{html.escape(title)}</title>
<style>{STYLE}</style>
</head>
<body><main>
<h1>{html.escape(title)}</h1>
{body}
</main></body>
</html>
"""


def _log(progress: Progress) -> str:
    return f"<pre>{html.escape(chr(10).join(progress.lines))}</pre>"


def page_of_progress(progress: Progress, base: str, log: Path) -> str:
    """The page shown instead of the book during the first build, or after that build failed."""
    lab = f'<p><a href="{html.escape(base)}lab">JupyterLab</a> is already running.</p>'
    if progress.state == "failed":
        body = (
            f"<p>The build failed. Its last lines are below; the full log is in "
            f"<code>{html.escape(str(log))}</code>. Fix the error, stop the server with Ctrl-C, "
            f"and run <code>make course</code> again. "
            f"<code>.venv/bin/python -m labcore doctor</code> says what this machine is "
            f"missing.</p>{lab}{_log(progress)}"
        )
        return _page("The book could not be built", body)
    done = f"page {progress.page} of {progress.pages}" if progress.page else "starting"
    last = f"<pre>{html.escape(progress.lines[-1])}</pre>" if progress.lines else ""
    body = (
        f'<p role="status">The first build runs every chapter: {done}. When it is done, the book '
        f"appears here.</p>"
        f'<progress max="{progress.pages or 1}" value="{progress.page}" '
        f'aria-label="pages read">{done}</progress>{lab}{last}'
    )
    return _page("The book is being built", body, refresh=2)


def page_of_differences(name: str, mine: str, fragment: str) -> str:
    """The page that compares a copy (`mine`) with the current chapter (`name`)."""
    body = (
        f"<p>Lines with <del>-</del> are only in <code>{html.escape(mine)}</code>, and lines with "
        f"<ins>+</ins> are only in <code>{html.escape(name)}</code>. This page changes neither.</p>"
        f"{fragment}"
    )
    return _page("Your copy and the chapter", body)


def problem_page(sentence: str) -> str:
    """A page with one sentence that says what is wrong and what to do."""
    return _page("This cannot be shown", f"<p>{html.escape(sentence)}</p>")


def inject(page: str, base: str, notebook: str | None) -> str:
    """The book's page with the script for "Run this page", which needs this server."""
    name = f' data-notebook="{html.escape(notebook)}"' if notebook else ""
    script = f'<script src="{html.escape(base)}book/_labcore/run.js"{name} defer></script>'
    head, found, tail = page.rpartition("</body>")
    return head + script + found + tail if found else page + script
