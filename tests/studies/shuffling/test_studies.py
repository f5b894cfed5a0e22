"""The studies: corpora, orders and runs are what they say, and the diagnosis keeps its law."""

import itertools
import random
import sysconfig
from pathlib import Path

import pytest
import torch

from labcore.data import python_sources, python_text
from labcore.shuffling import design_effect
from labcore.studies.shuffling import causes, characters, digit_orders, tracing

TUNING_SEED = 10


@pytest.fixture(scope="module")
def data() -> characters.Corpus:
    return characters.corpus("sources", TUNING_SEED)


def test_a_row_is_the_letters_of_its_file(data: characters.Corpus, seed: int) -> None:
    library = Path(sysconfig.get_paths()["stdlib"])
    place = random.Random(seed).randrange(len(data.files.files))
    first, name = data.files.first_rows[place] + 1, data.files.files[place]
    if data.files.of([first]) != (name,):
        pytest.skip("a file shorter than a row")
    shown = "".join(map(chr, data.rows[first, characters.CONTEXT :].tolist()))
    source = (library / name).read_text(encoding="utf-8", errors="replace")
    assert shown in "".join(c if ord(c) < 127 else chr(127) for c in source)
    # The context is the end of the row before.
    assert torch.equal(
        data.rows[first, : characters.CONTEXT], data.rows[first - 1, -characters.CONTEXT :]
    )


def test_slices_have_no_file_in_common_and_no_held_out_file() -> None:
    slices = [set(characters.corpus("sources", seed).files.files) for seed in (0, 1, 10)]
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(slices, 2))
    held_out = set(python_sources("held_out").files)
    assert all(names.isdisjoint(held_out) for names in slices)
    assert (
        characters.corpus("sources", 0).files
        == characters.corpus("sources", characters.SLICES["sources"]).files
    )


def test_docstrings_are_those_of_labcore_data() -> None:
    small = python_text("train", max_bytes=60_000)
    first = characters.corpus("documentation", 0)
    shown = "".join(map(chr, first.rows[:20, characters.CONTEXT :].flatten().tolist()))
    named = [name for name in first.files.files if name in small.files]
    assert named and shown[:100].strip() in small.text


def test_letters_beyond_ascii_share_one_number() -> None:
    assert characters.letters_of("a\n\x7fé漢😀").tolist() == [97, 10, 127, 127, 127, 127]


@pytest.mark.parametrize("order", list(characters.ORDERS))
def test_every_order_gives_each_row_at_most_once(order: str, seed: int) -> None:
    dice = random.Random(seed)
    lengths = [dice.randrange(1, 700) for _ in range(23)]
    rows = sum(lengths)
    found = list(itertools.islice(characters.ORDERS[order](lengths, seed), rows))
    assert len(found) == len(set(found)) == rows
    assert all(0 <= row < rows for row in found)
    if order == "batches shuffled":
        batches = [found[at : at + 32] for at in range(0, rows // 32 * 32, 32)]
        assert sorted(batches) == [list(range(at, at + 32)) for at in range(0, rows // 32 * 32, 32)]


def test_a_short_corpus_is_the_beginning_of_the_long_one(
    data: characters.Corpus, seed: int
) -> None:
    rows = random.Random(seed).randrange(320, 4_000)
    short = characters.corpus("sources", TUNING_SEED, rows=rows)
    assert torch.equal(short.rows, data.rows[:rows])
    assert short.files.of([rows - 1]) == data.files.of([rows - 1])
    assert sum(short.lengths) == rows and sum(data.lengths) == len(data.rows)
    run = characters.run("full", TUNING_SEED, rows=rows)
    assert len(run.losses) == rows // 32 and max(map(max, run.rows)) < rows


def test_bad_steps_are_where_the_damage_says(seed: int) -> None:
    count = random.Random(seed).randrange(200, 900)
    shard = characters.Damage(kind="noise", batches=7, place=0.25).steps(count, seed)
    assert shard == list(range(int(0.25 * count), int(0.25 * count) + 7))
    scattered = characters.Damage(kind="noise", place=None).steps(count, seed)
    assert len(set(scattered)) == 20 and min(scattered) >= 100 and max(scattered) < count
    assert scattered != characters.Damage(kind="noise", place=None).steps(count, seed + 1)
    with pytest.raises(ValueError, match="must fit into the run, got 20 from step 5 of 10"):
        characters.Damage(kind="noise").steps(10, seed)
    with pytest.raises(ValueError, match="kind must be one of"):
        characters.Damage(kind="dust").steps(count, seed)


def test_a_row_loss_is_the_mean_over_its_letters(data: characters.Corpus, generator) -> None:
    model = characters.NextCharacter(hidden=7, width=3).double()
    rows = data.rows[:5]
    found = characters.row_losses(model, rows)
    table = model.embedding.weight
    for row, loss in zip(rows, found, strict=True):
        total = 0.0
        for place in range(characters.ROW):
            seen = table[row[place : place + characters.CONTEXT]].T.flatten()
            hidden = torch.relu(model.hidden.weight @ seen + model.hidden.bias)
            scores = model.head.weight @ hidden + model.head.bias
            total -= scores.log_softmax(0)[row[place + characters.CONTEXT]].item()
        assert loss.item() == pytest.approx(total / characters.ROW, rel=1e-9)


def test_a_run_repeats_itself_and_learns() -> None:
    first, again = (characters.run("buffer 256", 11, steps=40) for _ in range(2))
    assert first == again
    assert first.held_out < characters.run("buffer 256", 11, steps=15).held_out < first.losses[0]
    other = characters.run("full", 11, steps=40)
    assert other.losses != first.losses and len(other.rows) == 40


def test_damage_changes_its_steps_and_none_before() -> None:
    clean = characters.run("full", 11, steps=60)
    for kind, length in (("noise", 3), ("one file", 3), ("long step", 1)):
        damage = characters.Damage(kind=kind, batches=length, place=0.5)
        run = characters.run("full", 11, steps=60, damage=damage)
        assert run.rows == clean.rows and run.bad == tuple(range(30, 30 + length))
        first = 31 if kind == "long step" else 30  # its batch is healthy: only its step is not
        assert run.losses[:first] == clean.losses[:first]
        assert run.losses[first] != clean.losses[first]
        if kind == "noise":
            assert run.losses[30] > clean.losses[30] + 1


def test_the_rate_falls_to_zero_or_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []

    def seen(_model: object, optimizer: torch.optim.Optimizer, batches: object):
        for _ in batches:
            rates.append(optimizer.param_groups[0]["lr"])
            yield 0.0

    monkeypatch.setattr(characters, "train", seen)
    characters.run("full", 11, steps=5, lr=0.5)
    assert rates == pytest.approx([0.5, 0.4, 0.3, 0.2, 0.1])
    rates.clear()
    characters.run("full", 11, steps=3, lr=0.5, schedule="constant")
    assert rates == [0.5, 0.5, 0.5]
    rates.clear()
    damage = characters.Damage(kind="long step", batches=1)
    characters.run("full", 11, steps=4, lr=0.5, damage=damage, optimizer="sgd")
    assert rates == pytest.approx([0.5, 0.375, 25.0, 0.125])


def brute(onsets: list[int], starts: list[int], steps: range, within: int) -> tuple[float, float]:
    """Share and p of boundary_test by its words alone."""

    def hits(shift: int) -> int:
        moved = [(s - steps.start + shift) % len(steps) + steps.start for s in onsets]
        return sum(any(0 <= step - start <= within for start in starts) for step in moved)

    true = hits(0)
    turned = [hits(shift) for shift in range(len(steps))]
    return true / len(onsets), sum(count >= true for count in turned) / len(turned)


def test_the_boundary_test_counts_all_turns(seed: int) -> None:
    dice = random.Random(seed)
    steps, within = range(13, 13 + dice.randrange(30, 90)), dice.randrange(4)
    onsets = sorted(dice.sample(steps, dice.randrange(1, 8)))
    starts = sorted(dice.sample(range(steps.stop), dice.randrange(1, 9)))
    found = tracing.boundary_test(onsets, starts, steps=steps, within=within)
    share, p = brute(onsets, starts, steps, within)
    assert (found.share, found.p) == (pytest.approx(share), pytest.approx(p))
    assert 1 / len(steps) <= found.p <= 1 and found.onsets == len(onsets)


def test_spikes_at_boundaries_are_found_and_random_ones_are_not(seed: int) -> None:
    starts = sorted(random.Random(seed).sample(range(60, 680), 12))
    steps = range(50, 700)
    sure = tracing.boundary_test([s + 1 for s in starts], starts, steps=steps)
    assert sure.share == 1 and sure.recall == 1 and sure.p <= 0.01 and sure.chance < 0.1
    # Under chance p is uniform or larger: 400 draws at most 5 % by more than 4 standard deviations.
    dice = random.Random(seed + 1)
    small = 0
    for _ in range(400):
        onsets = dice.sample(steps, 6)
        small += tracing.boundary_test(onsets, starts, steps=steps).p <= 0.05
    assert small <= 400 * 0.05 + 4 * (400 * 0.05 * 0.95) ** 0.5


def test_nothing_to_trace_is_refused() -> None:
    with pytest.raises(ValueError, match="onsets must .* got none"):
        tracing.boundary_test([3], [1], steps=range(50, 100))


def test_the_mean_distance_is_the_design_effect(generator: torch.Generator) -> None:
    rows = torch.randn(35 * 8, 3, generator=generator).double()
    order = torch.arange(len(rows)).reshape(35, 8)
    batches = [rows[one] for one in order]
    distances = tracing.batch_distances(batches, rows)
    # The design effect divides by k - 1 and n - 1.
    scale = (len(rows) - 1) / len(rows) * 35 / 34
    assert sum(distances) / 35 * scale == pytest.approx(design_effect(batches))


def test_pooled_batches_count_as_one() -> None:
    run = characters.run("file order", TUNING_SEED, steps=39)
    found = tracing.epoch_distances(run, "sources", TUNING_SEED, pooled=4)
    shares = tracing.letter_shares(characters.corpus("sources", TUNING_SEED).rows)
    whole = [shares[at : at + 128] for at in range(0, 36 * 32, 128)]
    assert found == pytest.approx(tracing.batch_distances(whole, shares))


def test_later_spikes_are_those_after_the_made_one() -> None:
    calm = [2.0 + 0.01 * (step % 3) for step in range(200)]
    losses = [*calm]
    for step in (60, 103, 120, 170):
        losses[step] = 9.0
    assert tracing.later_spikes(losses, 100) == 2
    assert tracing.spike_rate(losses) == pytest.approx(20)
    assert tracing.later_spikes(calm, 100) == 0


def test_letter_shares_leave_out_the_context(data: characters.Corpus) -> None:
    shares = tracing.letter_shares(data.rows[:7])
    assert shares.shape == (7, characters.LETTERS)
    assert torch.allclose(shares.sum(1), torch.ones(7).double())
    row = data.rows[3, characters.CONTEXT :].tolist()
    assert shares[3, row[0]].item() == pytest.approx(row.count(row[0]) / characters.ROW)


def test_sorted_digits_and_their_orders() -> None:
    labels = digit_orders.sorted_digits().train_y
    assert bool((labels[1:] >= labels[:-1]).all())
    for order in digit_orders.ORDERS:
        batches = digit_orders.batches_of(order, 32, seed=1, epochs=2)
        assert {len(batch) for batch in batches} == {32}
        assert len(batches) == 2 * (len(labels) // 32)
    full = digit_orders.batches_of("full", 32, epochs=2)
    assert not torch.equal(full[0], full[len(full) // 2])  # another permutation each epoch


def test_sorted_classes_collapse_and_their_entropy_says_so() -> None:
    bad, good = (digit_orders.train(order, 900, epochs=3) for order in ("sorted", "full"))
    assert bad.accuracy < 0.5 < 0.85 < good.accuracy
    assert bad.entropy.within < 0.2
    assert good.entropy.within == pytest.approx(good.entropy.expected, abs=0.05)


def test_prediction_is_exact_where_made_and_fails_past_a_class() -> None:
    effects = digit_orders.effects("sorted", seed=900, epochs=1)
    ratio = dict(
        zip(
            effects.sizes,
            (m / p for p, m in zip(effects.predicted, effects.measured, strict=True)),
            strict=True,
        )
    )
    assert ratio[32] == pytest.approx(1, abs=0.05)
    assert ratio[256] < 0.7  # a class has about 144 rows: a batch of 256 cannot be one class


def test_the_causes_show_what_their_symptoms_say() -> None:
    steps = 120
    curves = {name: causes.run(name, seed=11, steps=steps) for name in causes.SYMPTOMS}
    curves[causes.HEALTHY] = causes.run(causes.HEALTHY, seed=11, steps=steps)
    loss, fixed, distance = causes.PANELS
    mean = {name: sum(panels[distance]) / steps for name, panels in curves.items()}
    assert all(len(curve) == steps for panels in curves.values() for curve in panels.values())
    assert mean["file order"] > 2 > mean["learning rate too high"]
    corrupt = curves["one corrupt batch"]
    assert max(range(steps), key=corrupt[distance].__getitem__) == steps // 2
    assert corrupt[loss][steps // 2] > corrupt[loss][steps // 2 - 1] + 1
    again = curves["the same rows again"]
    assert again[distance][:8] == pytest.approx(again[distance][8:16])
    lost = curves["optimizer state lost"]
    assert lost[fixed][steps // 2] > lost[fixed][steps // 2 - 2] + 1
    assert lost[distance] == curves[causes.HEALTHY][distance]
    assert curves["learning rate too high"][fixed][-1] > curves[causes.HEALTHY][fixed][-1] + 0.2


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="name must be one of"):
        causes.run("bad luck")
    with pytest.raises(ValueError, match="order must be one of"):
        characters.run("random", 0)
    with pytest.raises(ValueError, match="schedule must be one of"):
        characters.run("full", 0, schedule="cosine")
    with pytest.raises(ValueError, match="corpus must be one of"):
        characters.corpus("novels")
