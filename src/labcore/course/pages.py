"""What the local server shows beside the book: the progress of its build, differences, errors."""

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
    """The page in place of the book while its first build runs, or after that build failed."""
    lab = f'<p><a href="{html.escape(base)}lab">JupyterLab</a> is ready meanwhile.</p>'
    if progress.state == "failed":
        body = (
            f"<p>The build stopped with an error. Its last lines stand below, all of them in "
            f"<code>{html.escape(str(log))}</code>. Mend what they name, stop the server with "
            f"Ctrl-C and run <code>make course</code> again; <code>python -m labcore doctor</code> "
            f"says what the machine lacks.</p>{lab}{_log(progress)}"
        )
        return _page("The book could not be built", body)
    done = f"page {progress.page} of {progress.pages}" if progress.page else "starting"
    last = f"<pre>{html.escape(progress.lines[-1])}</pre>" if progress.lines else ""
    body = (
        f'<p role="status">The first build runs every chapter: {done}. This page turns into the '
        f"book when it is done.</p>"
        f'<progress max="{progress.pages or 1}" value="{progress.page}" '
        f'aria-label="pages read">{done}</progress>{lab}{last}'
    )
    return _page("The book is being built", body, refresh=2)


def page_of_differences(name: str, mine: str, fragment: str) -> str:
    """The page that compares a copy (`mine`) with the chapter (`name`) as it is now."""
    body = (
        f"<p>Lines with <del>-</del> stand only in <code>{html.escape(mine)}</code>, lines with "
        f"<ins>+</ins> only in <code>{html.escape(name)}</code>. Nothing here changes either.</p>"
        f"{fragment}"
    )
    return _page("Your copy and the chapter", body)


def problem_page(sentence: str) -> str:
    """One sentence that says what is wrong and what to do."""
    return _page("This cannot be shown", f"<p>{html.escape(sentence)}</p>")


def inject(page: str, base: str, notebook: str | None) -> str:
    """The book's page with the server's script: only here is there something that runs it."""
    name = f' data-notebook="{html.escape(notebook)}"' if notebook else ""
    script = f'<script src="{html.escape(base)}book/_labcore/run.js"{name} defer></script>'
    head, found, tail = page.rpartition("</body>")
    return head + script + found + tail if found else page + script
