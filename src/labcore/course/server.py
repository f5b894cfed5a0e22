"""`make course`: JupyterLab and, on the same server at `/book/` and `/teaching/`, the two books.

`serve` starts the server, which loads this module as an extension. The extension starts the book's
build, serves its pages and makes copies of chapters. Every handler requires the server's token or
cookie.
"""

import atexit
import errno
import json
import os
import secrets
import signal
import socket
import sys
import webbrowser
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jupyter_server.auth.decorator import authorized
from jupyter_server.base.handlers import APIHandler, JupyterHandler
from jupyter_server.serverapp import ServerApp, list_running_servers
from jupyter_server.utils import url_path_join
from tornado import web

from labcore.course import copies, pages
from labcore.course.build import BookBuild
from labcore.exercises import progress

__all__ = ["port_problem", "serve"]

ASSETS = Path(__file__).parent / "assets"
NEVER_STORED = "no-cache"


def _root(settings: Mapping[str, Any]) -> Path:
    return Path(settings["labcore_build"].root)


class BookHandler(JupyterHandler, web.StaticFileHandler):
    """The book's files. Pages get the script that runs them, or show the first build's progress."""

    auth_resource = "contents"

    @web.authenticated
    @authorized
    async def head(self, path: str) -> None:  # type: ignore[override]
        """The headers of a file."""
        await self.answer(path, include_body=False)

    @web.authenticated
    @authorized
    async def get(self, path: str, include_body: bool = True) -> None:  # type: ignore[override]
        """A file of the book."""
        await self.answer(path, include_body=include_body)

    async def answer(self, path: str, *, include_body: bool) -> None:
        """Sends a page or a file, or, while there is no book yet, the progress of its build."""
        build: BookBuild = self.settings["labcore_build"]
        built = build.progress()
        if not built.available:
            if Path(path).suffix not in ("", ".html"):
                raise web.HTTPError(404)
            self._send_page(pages.page_of_progress(built, self.base_url, build.log))
            return
        if path.endswith(".ipynb"):
            self.set_attachment_header(path.rsplit("/", 1)[-1])
        if path and not path.endswith(("/", ".html")):
            await web.StaticFileHandler.get(self, path, include_body)
            return
        self.path_args = [path]
        self.path = self.parse_url_path(path)
        absolute = self.validate_absolute_path(
            self.root, self.get_absolute_path(self.root, self.path)
        )
        if absolute is not None:
            page = Path(absolute)
            name = page.relative_to(Path(self.root).absolute()).with_suffix(".ipynb").as_posix()
            notebook = name if name in copies.chapters(build.root) else None
            text = page.read_text(encoding="utf-8")
            self._send_page(pages.inject(text, self.base_url, notebook))

    def _send_page(self, text: str) -> None:
        _ = self.xsrf_token  # sets the cookie whose value the page's script sends with a POST
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.set_header("Cache-Control", NEVER_STORED)
        self.finish(text)

    def set_extra_headers(self, path: str) -> None:  # noqa: ARG002 - tornado's signature
        """Makes the browser revalidate every file, so that rebuilt ones show at once."""
        self.set_header("Cache-Control", NEVER_STORED)

    def compute_etag(self) -> str | None:
        """The ETag: from the response body for a page, from the content for a file."""
        if getattr(self, "absolute_path", None) is None:
            return web.RequestHandler.compute_etag(self)
        return web.StaticFileHandler.compute_etag(self)


class ScriptHandler(JupyterHandler):
    """The script that `inject` puts into the pages."""

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """The script."""
        self.set_header("Content-Type", "text/javascript; charset=utf-8")
        self.set_header("Cache-Control", NEVER_STORED)
        self.finish((ASSETS / "run.js").read_text(encoding="utf-8"))

    auth_resource = "contents"


class ProgressHandler(APIHandler):
    """The progress of the book's build, as JSON."""

    auth_resource = "contents"

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """The progress."""
        built = self.settings["labcore_build"].progress()
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps({"state": built.state, "page": built.page, "pages": built.pages}))


class LabsHandler(APIHandler):
    """What the reader has passed in the copies of the labs: {lab: a sentence}, as JSON."""

    auth_resource = "contents"

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """The sentences."""
        found = progress.kept(_root(self.settings))
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps({slug: progress.summary(rows) for slug, rows in found.items()}))


class CopyHandler(APIHandler):
    """A chapter's copies in `my/`: GET describes the newest, POST makes one."""

    auth_resource = "contents"

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """Whether there is a copy, and whether the chapter has changed since."""
        try:
            found = copies.newest(_root(self.settings), self.get_argument("notebook"))
        except ValueError as error:
            raise web.HTTPError(404, str(error)) from error
        self.set_header("Cache-Control", "no-store")
        self.finish(json.dumps(self._state(found)))

    def _state(self, found: copies.Copy | None) -> dict[str, Any]:
        if found is None:
            return {"copy": None, "changed": False, "open": None}
        path = found.path.relative_to(_root(self.settings)).as_posix()
        address = url_path_join(self.base_url, "lab", "tree", path)
        return {"copy": path, "changed": found.changed, "open": address}

    @web.authenticated
    @authorized
    async def post(self) -> None:
        """Makes the first copy, or another one with `fresh`; answers with the copy to open."""
        asked = self.get_json_body() or {}
        root = _root(self.settings)
        try:
            name = str(asked.get("notebook"))
            path = copies.create(root, name, fresh=asked.get("fresh") is True)
        except ValueError as error:
            raise web.HTTPError(404, str(error)) from error
        self.finish(json.dumps(self._state(copies.Copy(path=path, changed=False))))


class DifferencesHandler(JupyterHandler):
    """A page that compares a reader's copy with the chapter."""

    auth_resource = "contents"

    @web.authenticated
    @authorized
    async def get(self) -> None:
        """The page."""
        root, name = _root(self.settings), self.get_argument("notebook")
        try:
            fragment = copies.differences(root, name)
            found = copies.newest(root, name)
            mine = found.path.relative_to(root).as_posix() if found else ""
            text = pages.page_of_differences(name, mine, fragment)
        except ValueError as error:
            self.set_status(404)
            text = pages.problem_page(str(error))
        self.set_header("Content-Type", "text/html; charset=utf-8")
        self.finish(text)


def _jupyter_server_extension_points() -> list[dict[str, str]]:
    return [{"module": "labcore.course.server"}]


def _load_jupyter_server_extension(app: ServerApp) -> None:
    app.contents_manager.register_pre_save_hook(copies.drop_controls)
    build = BookBuild(Path(app.root_dir))
    build.start()
    atexit.register(build.stop)
    app.web_app.settings["labcore_build"] = build
    base = url_path_join(app.base_url, "book")
    app.web_app.add_handlers(
        ".*$",
        [
            (base, web.RedirectHandler, {"url": base + "/", "permanent": False}),
            (
                url_path_join(app.base_url, "teaching") + "(/.*|)",
                web.RedirectHandler,
                {"url": base + "/teaching{0}", "permanent": False},
            ),
            (base + "/_labcore/run.js", ScriptHandler),
            (base + "/_labcore/progress", ProgressHandler),
            (base + "/_labcore/labs", LabsHandler),
            (base + "/_labcore/copy", CopyHandler),
            (base + "/_labcore/differences", DifferencesHandler),
            (
                base + "/(.*)",
                BookHandler,
                {"path": str(build.html), "default_filename": "index.html"},
            ),
        ],
    )


def port_problem(root: Path, host: str, port: int) -> str | None:
    """None if the port is free, else a sentence that says what is wrong and what to do."""
    try:
        family = socket.getaddrinfo(host, port)[0][0]
    except socket.gaierror:
        return f"HOST={host} is not an address of this machine; leave it out, or name one"
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        if sys.platform != "win32":  # on Windows, this would share a port that is in use
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                return f"cannot open port {port} of {host} ({error.strerror}); choose another"
        else:
            return None
    for server in list_running_servers():
        if server["port"] == port and Path(server["root_dir"]).resolve() == root.resolve():
            where = f"{server['url']}book/?token={server['token']}"
            return f"this course is already running on port {port}; open {where}"
    return f"port {port} of {host} is in use; stop the program using it or pass --port {port + 1}"


def _has_screen() -> bool:
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def serve(root: Path, *, host: str, port: int, browser: bool) -> None:
    """Runs the course's server for the checkout at root until Ctrl-C or a signal ends it.

    host, port: where it listens. browser: whether to open the book if there is a display.
    Raises RuntimeError if the port is not free, ValueError if root is not a checkout.
    """
    from jupyterlab.labapp import LabApp  # type: ignore[import-untyped]

    if not (root / "_config.yml").is_file():
        raise ValueError(f"{root} has no _config.yml; run this in the course's folder")
    if problem := port_problem(root, host, port):
        raise RuntimeError(problem)
    # This configuration loads the extension and hides JupyterLab's news and nbgrader's menus.
    configured = [str(ASSETS / "jupyter"), os.environ.get("JUPYTER_CONFIG_PATH", "")]
    os.environ["JUPYTER_CONFIG_PATH"] = os.pathsep.join(filter(None, configured))
    token = os.environ.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    shown = host if host not in ("", "0.0.0.0", "::") else "127.0.0.1"
    address = f"http://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    for number in (signal.SIGHUP,) if hasattr(signal, "SIGHUP") else ():
        # Closing the terminal ends the server, as Ctrl-C does.
        signal.signal(number, lambda *_: signal.raise_signal(signal.SIGTERM))
    options = {
        "ServerApp.ip": host,
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.base_url": "/",
        "ServerApp.root_dir": root,
        "ServerApp.open_browser": False,
        "ServerApp.answer_yes": True,
        "IdentityProvider.token": token,
        "LabApp.check_for_updates_class": "jupyterlab.NeverCheckForUpdate",
        "Application.log_level": "WARN",
    }
    arguments = [f"--{name}={value}" for name, value in options.items()]
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        arguments.append("--allow-root")
    app = LabApp.initialize_server(argv=arguments)
    app.io_loop.add_callback(_announce, address, token, browser)
    app.start()


def _announce(address: str, token: str, browser: bool) -> None:
    book = f"{address}book/?token={token}"
    sys.stdout.write(
        f"\nThe course is running; press Ctrl-C to stop it.\n  book:       {book}\n"
        f"  JupyterLab: {address}lab?token={token}\n\n"
    )
    sys.stdout.flush()
    if browser and _has_screen():
        webbrowser.open(book)
