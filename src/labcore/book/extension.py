"""Connects the steps of a book's build to Sphinx's events; each step is in a small module."""

from __future__ import annotations

import os
from typing import Any

from sphinx.application import Sphinx
from sphinx.config import Config
from sphinx.errors import ConfigError

from labcore import __version__
from labcore.book import (
    chapter,
    clinics,
    docstrings,
    explorers,
    foot,
    kernels,
    ledger,
    links,
    llms,
    reference,
    runs,
    vendor,
)
from labcore.book.teaching import guide
from labcore.book.teaching.pages import Teaching
from labcore.course.address import parse_address

__all__ = ["connect"]


def configure(app: Sphinx, config: Config) -> None:
    """Applies the address from `_config.yml`; without one, pages do not link to the repository."""
    os.environ.update(kernels.QUIET)  # also for a notebook that myst-nb runs itself
    options = config.html_theme_options
    try:
        address = parse_address(options.get("repository_url") or "")
    except ValueError as error:
        raise ConfigError(f"_config.yml, repository: url: {error}") from error
    options["repository_url"] = address
    if not address:
        options["launch_buttons"] = {}
    config.labcore_build = foot.build_line(app.srcdir)
    config.templates_path.append(str(foot.TEMPLATES))


def connect(app: Sphinx) -> dict[str, Any]:
    """Connects every step; returns the extension's metadata for Sphinx."""
    # "html": a changed commit or version rewrites all pages.
    app.add_config_value("labcore_build", "", "html", str)
    app.add_directive("claims-cards", ledger.ClaimsCards)
    app.add_directive("claims-ledger", ledger.ClaimsLedger)
    app.add_directive("claims-totals", ledger.ClaimsTotals)
    app.add_directive("labcore-api", reference.ApiReference)
    app.add_directive("teaching", Teaching)
    app.setup_extension("sphinx.ext.autodoc")
    explorers.setup(app)
    clinics.setup(app)
    links.setup(app)
    app.connect("config-inited", configure)
    app.connect("env-get-outdated", runs.forget_changed)
    app.connect("env-before-read-docs", runs.run_missing)
    app.connect("doctree-read", vendor.drop_widget_state)
    app.connect("doctree-read", chapter.drop_marks)
    app.connect("doctree-read", chapter.join_folds)
    app.connect("doctree-read", runs.remember_run)
    # After Sphinx's own metadata collector, which would replace ours by text.
    app.connect("doctree-read", chapter.collect, priority=900)
    app.connect("autodoc-process-docstring", docstrings.translate)
    app.connect("missing-reference", docstrings.find_at_face)
    app.connect("missing-reference", guide.find_in_other_book)
    app.connect("doctree-resolved", chapter.split_title)
    app.connect("doctree-resolved", chapter.insert_header)
    app.connect("html-page-context", foot.add_foot)
    app.connect("html-page-context", foot.name_roles, priority=900)
    app.connect("html-page-context", vendor.trim_markup, priority=900)
    app.connect("html-page-context", vendor.trim_scripts, priority=900)
    app.connect("build-finished", vendor.copy_mathjax)
    app.connect("build-finished", foot.write_index, priority=400)
    app.connect("build-finished", llms.write_markdown)
    return {"version": __version__, "parallel_read_safe": True, "parallel_write_safe": True}
