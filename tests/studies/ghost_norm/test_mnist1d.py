"""The rows are those of the published recipe, and a draw is what it promises."""

import pytest
import torch

from labcore.studies.ghost_norm import mnist1d

# Every sixth number of three rows without noise, from mnist1d 0.0.2 (Apache-2.0) with numpy 2.4 and
# scipy 1.17: np.random.seed(11), (12), (13) before `transform`, with both noise scales at 0.
PUBLISHED = [
    (
        {"label": 2, "padding": 40, "scale": 0.807790096595, "shift": 17, "slope": -0.327051409139},
        [-0.163526, -0.11321, 0.097986, -0.019274, 0.037737, 0.088052, 0.138368],
    ),
    (
        {"label": 4, "padding": 39, "scale": 1.096019878606, "shift": 2, "slope": 0.36119066602},
        [0.180595, 0.111937, 0.06946, 0.013892, -0.041676, -0.097244, -0.152811],
    ),
    (
        {"label": 7, "padding": 55, "scale": 0.895016488014, "shift": 38, "slope": -0.327917590408},
        [-0.163959, -0.11351, -0.063061, -0.012612, 0.150955, 0.088286, 0.138734],
    ),
]


def test_rows_without_noise_are_those_of_the_package() -> None:
    given = [given for given, _ in PUBLISHED]
    rows = mnist1d.place(
        torch.tensor([each["label"] for each in given]),
        padding=torch.tensor([each["padding"] for each in given]),
        scale=torch.tensor([each["scale"] for each in given], dtype=torch.float64),
        shift=torch.tensor([each["shift"] for each in given]),
        slope=torch.tensor([each["slope"] for each in given], dtype=torch.float64),
    )
    wanted = torch.tensor([row for _, row in PUBLISHED], dtype=torch.float64)
    torch.testing.assert_close(rows[:, ::6], wanted, rtol=0, atol=1e-6)


def test_noise_around_a_digit_leaves_the_digit_alone(generator: torch.Generator) -> None:
    def place(**noise: torch.Tensor) -> torch.Tensor:
        flat = torch.zeros(1, dtype=torch.float64)
        none = torch.zeros(1, dtype=torch.int64)
        return mnist1d.place(
            torch.tensor([3]), padding=none + 60, scale=flat + 1, shift=none, slope=flat, **noise
        )

    noise = torch.randn(1, 72, generator=generator, dtype=torch.float64)
    changed = (place(around=noise) - place()).abs()[0] > 1e-9
    # The template is the first sixth of the 72 places, and so about the first sixth of the row.
    assert not changed[:6].any() and changed[8:].all()
    assert ((place(everywhere=noise) - place()).abs()[0] > 1e-9).all()


def test_a_draw_is_balanced_scaled_and_never_the_same_twice(seed: int) -> None:
    x, y = mnist1d.draw(5003, torch.Generator().manual_seed(seed))
    assert x.shape == (5003, mnist1d.LENGTH) and x.dtype == torch.float32
    counts = y.bincount(minlength=10)
    assert counts.min() == 500 and counts.max() == 501
    assert abs(x.mean().item()) < 0.1
    assert x.std().item() == pytest.approx(1, abs=0.03)
    again, labels = mnist1d.draw(5003, torch.Generator().manual_seed(seed))
    assert torch.equal(x, again) and torch.equal(y, labels)
    assert len(x.unique(dim=0)) == 5003
    other, _ = mnist1d.draw(5003, torch.Generator().manual_seed(seed + 1))
    assert not torch.equal(x, other)
    with pytest.raises(ValueError, match="count must be at least 1"):
        mnist1d.draw(0, torch.Generator())
