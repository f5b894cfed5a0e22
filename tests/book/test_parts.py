"""The parts of labcore.book that need no build."""

from __future__ import annotations

import importlib
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from docutils import nodes
from docutils.core import publish_doctree
from docutils.utils import Reporter

from labcore import claims, records
from labcore.book import chapter, docstrings, foot, ledger, reference, runs, vendor
from tests.book.mini import METADATA

GOOD = {"metadata": {"labcore": {"slug": "lion", **METADATA}}}


def changed(**changes: object) -> dict[str, object]:
    return {"metadata": {"labcore": {"slug": "lion", **METADATA, **changes}}}


def test_metadata_that_is_right() -> None:
    found = chapter.parse_metadata(GOOD)
    assert (found.slug, found.minutes, found.tier) == ("lion", 5, "cpu")
    assert found.objectives == ("say what `f` does",)


@pytest.mark.parametrize(
    ("notebook", "sentence"),
    [
        ({}, "metadata.labcore is missing"),
        (changed(minutes="5"), "minutes must be of type int, got '5'"),
        (changed(minutes=True), "minutes must be of type int, got True"),
        (changed(minutes=0), "minutes must be at least 1, got 0"),
        (changed(tier="tpu"), "tier must be one of cpu, 1gpu, multi, got 'tpu'"),
        (changed(objectives=[]), "objectives is empty"),
        (changed(objectives=[1]), "objectives must hold lines of text"),
        (changed(tiers="cpu"), "must not have tiers"),
        (
            {"metadata": {"labcore": {"slug": "x"}}},
            "add minutes, objectives, prerequisites, tier",
        ),
    ],
)
def test_metadata_that_is_not_says_what_to_do(notebook: dict[str, object], sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        chapter.parse_metadata(notebook)


def git(folder: Path, *words: str) -> None:
    who = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", "-C", str(folder), *who, *words], check=True, capture_output=True)


def test_the_commit_of_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert foot.commit(tmp_path) == ""
    git(tmp_path, "init")
    assert foot.commit(tmp_path) == ""  # no commit yet
    (tmp_path / "a").write_text("1")
    git(tmp_path, "add", "a")
    git(tmp_path, "commit", "-m", "one")
    name = foot.commit(tmp_path)
    assert len(name) >= 7 and name.isalnum()
    (tmp_path / "a").write_text("2")
    assert foot.commit(tmp_path) == f"{name} + changes"
    monkeypatch.setenv("PATH", str(tmp_path))  # git is not installed
    assert foot.commit(tmp_path) == ""
    assert foot.build_line(tmp_path).startswith("commit unknown · labcore ")


@pytest.mark.parametrize(
    ("address", "start"),
    [
        ("https://github.com/a/b", "https://github.com/a/b/issues/new?title="),
        ("https://gitlab.com/a/b", "https://gitlab.com/a/b/-/issues/new?issue[title]="),
    ],
)
def test_the_report_link_names_the_page(address: str, start: str) -> None:
    link = foot.report_link(address, "book/lion", "commit 1 & 2")
    assert link is not None and link.startswith(start)
    assert "book%2Flion" in link and "1%20%26%202" in link


def test_without_an_address_there_is_no_report_link() -> None:
    assert foot.report_link("", "book/lion", "") is None


def test_mathjax_is_a_small_part_of_the_wheel() -> None:
    files = vendor.mathjax_files()
    assert "tex-chtml.js" in files and "input/tex/extensions/ams.js" in files
    assert any(name.endswith("MathJax_Main-Regular.woff") for name in files)
    assert sum(path.stat().st_size for path in files.values()) < 3_000_000


def test_a_damaged_memory_of_runs_counts_as_none(tmp_path: Path) -> None:
    for text in ("{", "[]", ""):
        (tmp_path / "labcore.json").write_text(text)
        assert runs._read(tmp_path / "labcore.json") == {}


DOCSTRINGS = {
    "plain *stars*, a_name_ and |bars|": "plain *stars*, a_name_ and |bars|",
    "A `code` and `f`s, `**kwargs`.": "A code and fs, **kwargs.",
    "lr: the rate.\nbeta, eps: as\nthere.\nRaises ValueError.": (
        "lr: the rate.\n\nbeta, eps: as\nthere.\n\nRaises ValueError."
    ),
    "Args:\n    lr: the rate, which\n        goes on.\n    eps: small.": (
        "Args:\n\nlr: the rate, which goes on.\n\neps: small."
    ),
    "See:\n\n    x = *y\n\nEnd.": "See:\n\nx = *y\n\nEnd.",
    "- one `x`\n- two\n  more": "one x\n\ntwo more",
    "a <b> \\n `` c": "a <b> \\n `` c",
}


@pytest.mark.parametrize("text", DOCSTRINGS)
def test_docstrings_mean_what_they_say(text: str) -> None:
    rst = "\n".join(docstrings.to_rst(text.splitlines()))
    quiet = {"report_level": Reporter.INFO_LEVEL, "halt_level": Reporter.INFO_LEVEL}
    found = publish_doctree(rst, settings_overrides=quiet).astext()
    assert found.replace("\x00", "") == DOCSTRINGS[text]


def api_pages() -> list[list[str]]:
    """The arguments of each directive."""
    return [
        line.split()[1:]
        for file in (Path(__file__).parents[2] / "book" / "api").glob("*.md")
        for line in file.read_text(encoding="utf-8").splitlines()
        if line.startswith("```{labcore-api} ")
    ]


def test_the_api_pages_hold_every_module_with_public_names() -> None:
    named = [word for words in api_pages() for word in words]
    assert len(named) == len(set(named))
    # What a page leaves out by a minus stands on another one.
    assert {word[1:] for word in named if word[0] == "-"} == {
        w for w in named if "." in w[1:] and w[0] != "-"
    }
    named = [word for word in named if "." not in word]
    # How the pages are made and the labs graded is for no one to call.
    source = Path(reference.__file__).parents[1]
    public = {p.stem for p in source.iterdir() if not p.name.startswith(("_", "."))} - {
        "labs",
        "grading",
        "course",
        "book",
    }
    modules = {
        name for name in public if (source / f"{name}.py").exists() or (source / name).is_dir()
    }
    assert set(named) == modules


def test_a_name_is_listed_where_its_package_shows_it() -> None:
    listed = {module.__name__: reference.own_names(module) for module in reference.modules("optim")}
    assert "Lion" in listed["labcore.optim"]
    assert listed["labcore.optim.lion_optimizer"] == []
    assert "sign_or_nan" in listed["labcore.optim.rules"]
    assert "lion" not in listed["labcore.optim.rules"]


def test_each_public_name_stands_on_a_page() -> None:
    shown = {
        (name, id(vars(module)[name]))
        for arguments in api_pages()
        for module, names in reference.listed(arguments)
        for name in names
    }
    for package in {word for words in api_pages() for word in words if "." not in word}:
        for module in reference.modules(package):
            lost = {name for name in module.__all__ if (name, id(vars(module)[name])) not in shown}
            assert lost == set(), module.__name__


def test_module_with_its_own_page_keeps_what_its_package_exports() -> None:
    serving, router, simulate = (
        importlib.import_module(f"labcore.serving{end}")
        for end in ("", ".simulation.router", ".simulation.simulate")
    )
    assert "route_requests" not in reference.own_names(router)
    assert "route_requests" in reference.own_names(router, page="serving.simulation")
    elsewhere = [("route_requests", router.route_requests)]
    assert "route_requests" in reference.own_names(serving)
    assert "route_requests" not in reference.own_names(serving, page="serving", elsewhere=elsewhere)
    assert "CostModel" not in reference.own_names(simulate, page="serving.simulation")  # of costs


@pytest.mark.parametrize(
    ("target", "internal"),
    [
        ("labcore.claims._claim", True),
        ("labcore.claims.Claim", False),
        ("labcore.claims.Missing", False),
        ("labcore.nowhere.Missing", False),
    ],
)
def test_only_what_exists_and_is_not_public_is_internal(target: str, internal: bool) -> None:
    assert docstrings._is_internal(target) is internal


def cell(name: str, *, mode: str | None = "input", output: bool = False) -> nodes.container:
    """A code cell as the page's tree has it."""
    code = nodes.literal_block(name, name)
    made = nodes.container(nb_element="cell_code")
    made += nodes.container("", code, nb_element="cell_code_source")
    if output:
        made += nodes.container("", nodes.paragraph(text="out"), nb_element="cell_code_output")
    if mode:
        made["hide_mode"] = mode
    return made


def test_folded_cells_without_outputs_join_the_next_fold() -> None:
    tree = publish_doctree("")
    tree += [cell("a"), cell("b"), cell("c", output=True), cell("d"), nodes.paragraph(text="text")]
    tree += [cell("e"), cell("f", mode=None), cell("g", output=True), cell("h")]
    chapter.join_folds(None, tree)
    chapter.join_folds(None, tree)
    folds = [
        [block.astext() for block in one.findall(nodes.literal_block)]
        for one in tree.children
        if isinstance(one, nodes.container)
    ]
    assert folds == [["a", "b", "c"], ["d"], ["e"], ["f"], ["g"], ["h"]]


@pytest.mark.parametrize(
    ("docname", "form", "parts"),
    [
        ("book/lion", "html", ["Lion *x*", ": ", "A sign: only"]),
        ("book/lion", "latex", ["Lion *x*: a sign: only"]),
        ("labs/lion", "html", ["Lion *x*: a sign: only"]),
    ],
)
def test_a_title_is_split_at_its_first_colon(docname: str, form: str, parts: list[str]) -> None:
    app = SimpleNamespace(builder=SimpleNamespace(format=form))
    tree = publish_doctree("")
    tree += nodes.section("", nodes.title(text="Lion *x*: a sign: only"))
    chapter.split_title(app, tree, docname)
    title = next(tree.findall(nodes.title))
    assert [part.astext() for part in title.children] == parts
    chapter.split_title(app, publish_doctree("no title"), docname)


def test_a_cards_numbers_are_the_recorded_ones() -> None:
    item = claims.claim("lion.speed")
    fused = records.find("lion", "step-time/quarter-gpt2", "Lion over torch AdamW fused")
    mean = item.part("optimizer step, torch's fused AdamW").measured(fused).mean
    said = ledger.with_numbers(item, "a < b: {optimizer step, torch's fused AdamW} times")
    assert said == f"a &lt; b: <strong>{mean:.3g}</strong> times"
    noisy = "{whole training step, 2,048 tokens},"
    assert "</strong> (too close to call; the rule says at most 1)," in ledger.with_numbers(
        item, noisy
    )
    with pytest.raises(ValueError, match="must say what was measured"):
        ledger.with_numbers(item, "")
    with pytest.raises(ValueError, match="batch 257"):
        ledger.with_numbers(item, "{batch 257}")
