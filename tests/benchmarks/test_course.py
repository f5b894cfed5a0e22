"""What importing and starting the course takes."""

import http.server
import subprocess
import sys
import threading

import pytest

from benchmarks import course


def test_each_import_is_timed_in_a_process_that_has_torch() -> None:
    plain, optim = course.imports(course.SMALL)
    assert plain.quantity == "import beyond torch's/labcore"
    # optim brings a dozen modules more, and both together a fraction of torch's seconds.
    assert 0 < plain.samples[0] < optim.samples[0] < 3


def test_waiting_ends_with_an_answer_or_with_the_program() -> None:
    server = http.server.HTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}/"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        course._wait(address, running)
        server.shutdown()
        server.server_close()
        with pytest.raises(RuntimeError, match="no answer at"):
            course._wait(address, running, seconds=0.5)
        running.kill()
        with pytest.raises(RuntimeError, match="run make course to see why"):
            course._wait(address, running)
