import pytest
import torch

from fedortho.errors import BadData
from fedortho.statistics.observe import Observation
from fedortho.unlearning.rank import Ranking, rank_correlation, rank_kernels, same_label_retain


def observation(rows: list[list[float]], counts: list[int], stale: tuple[str, ...] = ()) -> Observation:
    return Observation({"conv:a": torch.tensor(rows, dtype=torch.float64)}, torch.tensor(counts), "", stale)


def test_scores_are_differences_of_means_and_ignore_how_many_images_were_seen() -> None:
    forget = observation([[4.0, 2.0], [0.0, 0.0]], [2, 0])
    retain = observation([[0.0, 0.0], [30.0, 100.0]], [0, 100])
    ranking = rank_kernels(forget, retain, {"a": "conv:a"})
    assert ranking.scores["a"].tolist() == [2.0 - 0.3, 1.0 - 1.0]


def test_equal_scores_keep_their_order() -> None:
    ranking = Ranking({"a": torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0])})
    assert ranking.order("a").tolist() == [1, 2, 4, 0, 3]


def test_the_same_label_contrast_weights_retained_labels_as_the_forgotten_ones_occur() -> None:
    forget = observation([[3.0], [1.0], [0.0]], [3, 1, 0])
    retain = observation([[10.0], [40.0], [900.0]], [10, 20, 30])
    contrast = same_label_retain(forget, retain)
    assert contrast.mean("conv:a").item() == pytest.approx((3 * 1.0 + 1 * 2.0) / 4)
    with pytest.raises(BadData, match="no retained image has label 0"):
        same_label_retain(forget, observation([[0.0], [40.0], [900.0]], [0, 20, 30]))


def test_a_stale_ledger_entry_is_refused() -> None:
    stale = observation([[1.0]], [1], ("conv:a",))
    with pytest.raises(BadData, match="stale for conv:a"):
        rank_kernels(stale, stale, {"a": "conv:a"})


def test_rank_correlation_is_that_of_the_places_averaged_over_sites() -> None:
    generator = torch.Generator().manual_seed(0)
    first, second = (
        Ranking(
            {name: torch.randn(size, generator=generator).round(decimals=1) for name, size in (("a", 30), ("b", 7))}
        )
        for _ in range(2)
    )
    slow = []
    for site in ("a", "b"):
        places = [{int(kernel): n for n, kernel in enumerate(ranking.order(site))} for ranking in (first, second)]
        size = len(places[0])
        squares = sum((places[0][kernel] - places[1][kernel]) ** 2 for kernel in range(size))
        slow.append(1 - 6 * squares / (size * (size**2 - 1)))
    assert rank_correlation(first, second) == pytest.approx(sum(slow) / 2, abs=1e-9)


def test_rank_correlation_is_one_for_the_same_order_and_minus_one_for_the_opposite() -> None:
    first = Ranking({"a": torch.tensor([1.0, 2.0, 3.0, 4.0])})
    assert rank_correlation(first, Ranking({"a": torch.tensor([10.0, 20.0, 30.0, 99.0])})) == pytest.approx(1)
    assert rank_correlation(first, Ranking({"a": -first.scores["a"]})) == pytest.approx(-1)
