"""The walk shows what the verifier saw and decided, in frames of one shape."""

import html

import plotly.graph_objects as go
import pytest
import torch

from labcore.decoding.contract import Draft
from labcore.decoding.draws import Draws
from labcore.decoding.trace import Step, step_of
from labcore.decoding.verify import greedy_match, rejection_sampling, sample_and_compare
from labcore.models.tokenizer import ByteTokenizer
from labcore.ui import IntSlider, draw, explore, twin
from labcore.ui.figures.speculative import walking as figures

VOCAB, GAMMA = 257, 4


def decode(tokens: list[int]) -> str:
    return ByteTokenizer().decode(tokens, special=True)


def recorded(
    generator: torch.Generator, *, steps: int, drawn: bool = True, verify=rejection_sampling
) -> tuple[list[Step], list[int]]:
    """Steps over random p and q, drafts of 0 to GAMMA tokens, and the tokens of the row."""
    draws, tokens, found = Draws(generator), list(b"def f(self, <b>x</b>):\n"), []
    for number in range(steps):
        size = number % (GAMMA + 1)
        p, q = torch.randn(2, GAMMA + 1, VOCAB, generator=generator).mul(4).softmax(-1)
        q = p.lerp(q, 0.4)[:size]
        drafted = [draws.token(row) for row in q]
        draft = Draft.chain(drafted, q if drawn else None)
        decided = verify(p[: size + 1], draft, generator)
        joined = [drafted[node] for node in decided.path] + [decided.next_token]
        found.append(
            step_of(
                p[: size + 1], draft, decided, row=0, context=len(tokens), tokens=joined,
                target_length=len(tokens), draft_length=None,
            )
        )  # fmt: skip
        tokens += joined
    return found, tokens


def trace(figure: go.Figure, name: str):
    return next(item for item in figure.data if item.name == name)


def words(figure: go.Figure) -> tuple[str, str, str, str]:
    """The title, the title of the draw's axis, and both lines below the probabilities."""
    layout = figure.layout
    said = (layout.title.text, layout.xaxis2.title.text, *layout.xaxis3.title.text.split("<br>"))
    title, drawn, chances, context = map(html.unescape, said)
    return title, drawn, chances, context


@pytest.mark.parametrize("drawn", [True, False])
def test_every_place_shows_its_rows_its_draw_and_its_verdict(drawn: bool, generator) -> None:
    steps, tokens = recorded(generator, steps=20, drawn=drawn)
    data = figures.walk_data(steps, decode, tokens, top=7)
    for step, shown in zip(steps, data, strict=True):
        size = len(step.draft_tokens)
        assert len(shown.places) == size + 1 and shown.accepted == len(step.path)
        verdicts = [place.verdict for place in shown.places]
        taken = len(step.path)
        middle = ["rejected"] * (taken < size) + ["not judged"] * (size - taken - 1)
        last = "next token" if taken == size else "none"
        assert verdicts == ["accepted"] * taken + middle + [last]
        for at, place in enumerate(shown.places):
            assert len(place.names) == len(set(place.names)) == len(place.p) == 8
            assert sum(place.p) == pytest.approx(1, abs=1e-4)
            assert (place.residual is not None) == (place.verdict == "rejected")
            assert (place.q is None) == (at == size)
            if place.verdict in ("accepted", "rejected"):
                assert place.u == step.draws[at]
                assert (place.u < place.ratio) == (place.verdict == "accepted")
                token = step.draft_tokens[at]
                assert place.here_p == pytest.approx(float(step.p[at, token]))
                assert place.ratio == pytest.approx(min(1, place.here_p / place.here_q))
                assert place.here_p in place.p
            if place.residual is not None:
                assert sum(place.residual) == pytest.approx(1, abs=1e-4)


def test_the_figure_draws_the_place_and_says_what_happens(generator) -> None:
    steps, tokens = recorded(generator, steps=25)
    data = figures.walk_data(steps, decode, tokens)
    seen = set()
    for number, shown in enumerate(data, 1):
        for position, place in enumerate(shown.places, 1):
            figure = figures.walk(number, position, data=data)
            title, drawn, chances, context = words(figure)
            seen.add(place.verdict)
            if place.verdict in ("accepted", "rejected"):
                sign, word = ("<", "accept") if place.verdict == "accepted" else ("≥", "reject")
                assert f" {sign} " in title and f'{word} "{place.token}"' in title
                assert f"p/q = {place.here_p:.2g}/{place.here_q:.2g}" in drawn
                assert ("residual" in chances) == (place.verdict == "rejected")
                assert list(trace(figure, "draw u").x) == [place.u]
                assert list(trace(figure, "accepts").x) == [0, place.ratio]
                assert list(trace(figure, "rejects").x) == [place.ratio, 1]
            else:
                assert list(trace(figure, "draw u").x) == [None]
            assert tuple(trace(figure, "target p").x) == place.p
            residual = trace(figure, "residual").x
            assert tuple(residual) == (place.residual or (None,) * len(place.p))
            assert context == f"after: {shown.tail}"
    assert seen == {"accepted", "rejected", "not judged", "next token", "none"}


def test_frames_share_traces_and_axes_and_titles_fit_a_phone(generator) -> None:
    steps, tokens = recorded(generator, steps=15)
    data = figures.walk_data(steps, lambda row: "_".join(f"long<name>{x}" for x in row), tokens)
    assert figures.most_places(data) == GAMMA + 1
    kinds = set()
    for number in range(1, 16):
        for position in range(1, GAMMA + 2):
            figure = figures.walk(number, position, data=data)
            kinds.add(
                (
                    tuple((item.type, item.name, len(item.x)) for item in figure.data),
                    *(tuple(figure.layout[f"{axis}"].range) for axis in (
                        "xaxis", "xaxis2", "xaxis3", "yaxis", "yaxis2", "yaxis3")),
                )
            )  # fmt: skip
            assert max(map(len, words(figure))) <= 44, words(figure)
            assert "<br>" not in figure.layout.title.text
            (edge,) = {tuple(figure.data[0].marker.line.width)}
            assert [at for at, width in enumerate(edge, 1) if width] == [position]
    assert len(kinds) == 1


def test_the_static_page_carries_the_walk(generator, monkeypatch: pytest.MonkeyPatch) -> None:
    steps, tokens = recorded(generator, steps=24)
    data = figures.walk_data(steps, decode, tokens)
    monkeypatch.setenv("LABCORE_BOOK", "1")
    controls = {
        "step": IntSlider(low=1, high=24, default=2),
        "position": IntSlider(low=1, high=GAMMA + 1, default=1),
    }
    shown = explore(figures.walk, alt="x", data=data, **controls)
    (only,) = shown._repr_mimebundle_()[twin.MIME]["slices"]
    frames = only["frames"]
    assert len(frames) == 24 * (GAMMA + 1) <= twin.MOST_FRAMES


def test_greedy_decoding_has_no_draw(generator) -> None:
    def greedy(p, draft, _generator):
        return greedy_match(p, draft)

    steps, tokens = recorded(generator, steps=20, drawn=False, verify=greedy)
    data = figures.walk_data(steps, decode, tokens)
    seen = set()
    for number, shown in enumerate(data, 1):
        for position, place in enumerate(shown.places, 1):
            title, _, chances, _ = words(figures.walk(number, position, data=data))
            assert place.u is None
            if place.verdict in ("accepted", "rejected"):
                seen.add(place.verdict)
                assert title.startswith(f"greedy: {place.verdict[:6]}")
                assert ("the target says" in chances) == (place.verdict == "rejected")
    assert "rejected" in seen


def test_one_hot_rows_keep_the_axis_of_all_frames() -> None:
    p = torch.zeros(2, VOCAB)
    p[:, 65] = 1
    draft = Draft.chain([66])
    step = step_of(
        p, draft, greedy_match(p, draft), row=0, context=0, tokens=[65], target_length=0,
        draft_length=None,
    )  # fmt: skip
    (shown,) = figures.walk_data([step], decode, [65], top=5)
    names = shown.places[0].names
    assert names[:2] == ("A", "B") and names[-1] == "all others" and len(set(names)) == 6
    assert shown.places[0].p == (1, 0, 0, 0, 0, 0) and shown.places[0].q == (0, 1, 0, 0, 0, 0)


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        (" self", "·self"), ("        ", "8 spaces"), ("\n", "↵"), ("\x00", "\\x00"),
        ("a_very_long_name", "a_very_lo…"), (" ", "·"), ("", ""),
        ("\n        ", "↵ 8 spaces"), ("\n\n" + " " * 12, "↵↵ 12 spaces"), ("\n  ", "↵··"),
        ("\r\n", "\\r↵"), ("é中", "é\\u4e2d"), ("\ufffd", "\ufffd"),
    ],
)  # fmt: skip
def test_tokens_have_names_that_an_axis_has_room_for(token: str, shown: str) -> None:
    assert draw.token(token) == shown


def test_lookalike_tokens_get_their_numbers_and_tags_stay_text() -> None:
    assert figures._names(["�", "x", "�"], [200, 120, 201], 3) == (
        "� 200", "x", "� 201", "all others"
    )  # fmt: skip
    assert draw.label("<b>") == "&lt;b&gt;" and draw.label("a < b") == "a < b"
    assert draw.label("&lt;") == "&amp;lt;"


def test_numbers_that_differ_look_different() -> None:
    assert figures._apart(0.741, 0.738) == ("0.741", "0.738")
    assert figures._apart(0.31, 0.74) == ("0.31", "0.74")
    assert figures._apart(0.4, 4.12e-5) == ("0.40", "4.1e-05")
    assert figures._apart(0.0, 1.0) == ("0.00", "1.00")


def test_other_verifiers_and_trees_are_refused(generator) -> None:
    with pytest.raises(ValueError, match="a walk shows rejection sampling"):
        steps, tokens = recorded(generator, steps=60, verify=sample_and_compare)
        figures.walk_data(steps, decode, tokens)
    p = torch.full((3, VOCAB), 1 / VOCAB)
    tree = Draft(torch.tensor([1, 2]), torch.tensor([-1, -1], dtype=torch.int32))
    decided = rejection_sampling(p, tree, generator)
    step = step_of(
        p, tree, decided, row=0, context=0, tokens=[], target_length=0, draft_length=None
    )
    with pytest.raises(ValueError, match="a walk shows chains"):
        figures.walk_data([step], decode, [])
