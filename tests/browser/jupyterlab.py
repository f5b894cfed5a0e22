"""A JupyterLab of one's own, driven in Chromium; and the delay from a key to a changed trace.

`python -m tests.browser.jupyterlab [PRESSES]` measures the delay on this machine.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat

from labcore.course import doctor
from tests.browser.conftest import FLAGS, PATIENCE_MS

KERNEL = {"name": "python3", "display_name": "Python 3", "language": "python"}

# `work` keeps the figure function busy: 25 ms in all is near the most that a chapter allows itself.
EXPLORER = """\
import time
import numpy as np
import plotly.graph_objects as go
from labcore import ui

def wave(frequency, phase, work=%s):
    end = time.perf_counter() + work
    x = np.linspace(0, 6, 300)
    traces = [go.Scatter(x=x, y=np.sin(frequency * x + i + phase), name=str(i)) for i in range(3)]
    while time.perf_counter() < end:
        pass
    return go.Figure(traces).update_layout(title=f"frequency {frequency:.3g}, phase {phase:.3g}")

ui.explore(
    wave,
    alt="Three sine waves.",
    frequency=ui.Slider(low=0, high=10, default=1, step=0.1),
    phase=ui.Slider(low=0, high=3, default=0),
)
"""

# Each press is timed from the key event's own time stamp to the first drawing with other heights.
_WATCH = """() => {
  const plot = document.querySelector('.jp-OutputArea-output .js-plotly-plot');
  const heights = () => Array.from(plot._fullData[0].y).join();
  window.delays = []; let pressed = null, before = heights();
  document.addEventListener('keydown', e => { pressed = e.timeStamp; before = heights(); }, true);
  plot.on('plotly_afterplot', () => {
    if (pressed === null || heights() === before) return;
    window.delays.push(performance.now() - pressed); pressed = null;
  });
}"""


def write_notebook(path: Path, cells: list[str]) -> None:
    book = nbformat.v4.new_notebook(metadata={"kernelspec": KERNEL})
    book.cells = [nbformat.v4.new_code_cell(cell) for cell in cells]
    nbformat.write(book, path)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def jupyterlab(root: Path) -> Iterator[str]:
    """A JupyterLab over the folder `root`, with settings of its own; yields its address."""
    port, home = _free_port(), root / ".home"
    quiet = home / "settings" / "@jupyterlab" / "apputils-extension"
    quiet.mkdir(parents=True)
    news = {"fetchNews": "false", "checkForUpdates": False}
    (quiet / "notification.jupyterlab-settings").write_text(json.dumps(news))
    environment = {k: v for k, v in os.environ.items() if k != "LABCORE_BOOK"} | {
        "HOME": str(home),
        "JUPYTER_CONFIG_DIR": str(home / "config"),
        "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(home / "settings"),
        "IPYTHONDIR": str(home / "ipython"),
    }
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--ip=127.0.0.1",
        f"--port={port}", "--ServerApp.port_retries=0", f"--ServerApp.root_dir={root}",
        "--IdentityProvider.token=", "--LabApp.news_url=None",
        "--LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate",
    ]  # fmt: skip
    with (root / "server.log").open("w") as log:
        server = subprocess.Popen(
            command, cwd=root, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        _wait(f"http://127.0.0.1:{port}/api/status", server, root / "server.log")
        yield f"http://127.0.0.1:{port}"
    finally:
        # The kernels stand in the server's own group.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGTERM)
        try:
            server.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(server.pid, signal.SIGKILL)
            server.wait(20)


def _wait(address: str, server: subprocess.Popen[bytes], log: Path) -> None:
    end = time.monotonic() + 180
    while time.monotonic() < end and server.poll() is None:
        try:
            with urllib.request.urlopen(address, timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"JupyterLab did not start:\n{log.read_text()[-3000:]}")


def run_all(page: Any, address: str, name: str) -> None:
    """Open the notebook `name`, run all its cells from the menu, wait until they are done."""
    page.set_default_timeout(PATIENCE_MS)
    page.goto(
        f"{address}/lab/workspaces/{Path(name).stem}/tree/{name}?reset",
        wait_until="domcontentloaded",
    )
    page.wait_for_selector(".jp-Notebook .jp-CodeCell")
    idle = "() => document.querySelector('.jp-Notebook-ExecutionIndicator[data-status=idle]')"
    page.wait_for_function(idle)
    page.locator(".jp-NotebookPanel:visible .jp-Notebook").click(position={"x": 30, "y": 10})
    prompts = "Array.from(document.querySelectorAll('.jp-CodeCell .jp-InputPrompt'))"
    started = f"() => {prompts}.some(e => /\\[[*\\d]/.test(e.textContent))"
    done = f"() => {prompts}.every(e => /\\[\\d+\\]/.test(e.textContent))"
    accept = page.locator(".jp-Dialog .jp-mod-accept")
    for attempt in range(200):
        # While the kernel's session is being made, the menu does nothing or asks for a kernel.
        if accept.is_visible():
            accept.click()
        elif attempt % 10 == 0 and not page.evaluate(started):
            page.get_by_role("menuitem", name="Run", exact=True).click()
            page.get_by_text("Run All Cells", exact=True).click()
        page.wait_for_timeout(1000)
        if page.evaluate(done):
            return
    page.wait_for_function(done)


def slider_of_figure(page: Any) -> Any:
    """The first slider's handle, once its figure is drawn."""
    handle = page.locator(".jp-OutputArea-output .noUi-handle").first
    handle.wait_for()
    page.wait_for_function(
        "() => { const p = document.querySelector('.jp-OutputArea-output .js-plotly-plot');"
        " return p && p._fullData && p._fullData.length; }"
    )
    handle.scroll_into_view_if_needed()
    handle.focus()
    return handle


def delays_ms(page: Any, presses: int) -> list[float]:
    """Milliseconds from each key press on the first slider to the changed trace."""
    handle = slider_of_figure(page)
    page.wait_for_timeout(1500)  # the page is still busy with its start
    page.evaluate(_WATCH)
    for number in range(presses):
        handle.press("ArrowRight")
        page.wait_for_function("n => window.delays.length > n", arg=number)
        page.wait_for_timeout(50 + 37 * (number % 5))  # not in step with any timer
    return [float(value) for value in page.evaluate("() => window.delays")]


def measure(presses: int = 40, work_s: float = 0.022) -> list[float]:
    """The delays of `presses` key presses in a fresh JupyterLab.

    work_s: seconds that the figure function computes before it makes its figure (about 3 ms).
    """
    from playwright.sync_api import sync_playwright

    with tempfile.TemporaryDirectory() as folder, sync_playwright() as driver:
        root = Path(folder)
        write_notebook(root / "delay.ipynb", [EXPLORER % work_s])
        path = doctor.browser()
        if not path:
            raise RuntimeError("no Chromium here: install it or set CHROMIUM to its path")
        with jupyterlab(root) as address:
            browser = driver.chromium.launch(executable_path=path, args=FLAGS)
            page = browser.new_page(viewport={"width": 1500, "height": 1200})
            run_all(page, address, "delay.ipynb")
            found = delays_ms(page, presses)
            browser.close()
    return found


def main(presses: int) -> None:
    found = sorted(measure(presses))
    p95 = statistics.quantiles(found, n=20, method="inclusive")[-1]
    report = {"n": len(found), "p50": statistics.median(found), "p95": p95, "most": found[-1]}
    sys.stdout.write(json.dumps({k: round(v, 1) for k, v in report.items()}) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 40)
