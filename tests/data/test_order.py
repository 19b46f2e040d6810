"""The order: sound permutations, any size, a pure function of (seed, step)."""

import itertools
import math

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from data import Order

sizes = st.integers(1, 300)


def epoch(order: Order, number: int) -> np.ndarray:
    """The examples of an epoch in order, through batches of any size."""
    n, size = order.num_examples, order.batch_size
    first, last = number * n // size, -(-(number + 1) * n // size)
    indices = np.concatenate([order.batch(step)[0] for step in range(first, last)])
    return indices[number * n - first * size :][:n]


@hypothesis.given(n=sizes, batch_size=sizes, seed=st.integers(-(2**70), 2**70), number=st.integers(0, 3))
@hypothesis.settings(deadline=None, max_examples=50)
def test_every_epoch_is_a_permutation(n: int, batch_size: int, seed: int, number: int) -> None:
    """Cases R11, D61."""
    order = Order(n, batch_size, seed)
    indices = epoch(order, number)
    assert sorted(indices) == list(range(n))
    np.testing.assert_array_equal(indices, epoch(Order(n, 7, seed), number))


def test_epochs_and_seeds_differ_and_the_same_seed_reproduces() -> None:
    """Cases R4, D61."""
    orders = [tuple(epoch(Order(100, 8, seed), number)) for seed in (0, 1) for number in (0, 1)]
    assert len(set(orders)) == 4
    assert orders[0] == tuple(epoch(Order(100, 8, seed=0), 0))


def test_order_is_the_one_that_running_jobs_rely_on() -> None:
    """A change here changes every run that is under way. Case D61."""
    assert Order(10, 10, seed=0).batch(0)[0].tolist() == [2, 7, 3, 5, 9, 4, 0, 8, 6, 1]
    assert Order(10**9, 3, seed=1).batch(10**6)[0].tolist() == [117826102, 528784911, 347050599]


@pytest.mark.parametrize("n", [2, 3, 4, 5, 6])
def test_small_permutations_are_uniform(n: int) -> None:
    """Chi-square over all n! permutations, 40,000 epochs; 4.5 sigma."""
    trials = 40_000
    indices, _ = Order(n, n * trials, seed=0).batch(0)
    codes = indices.reshape(trials, n) @ n ** np.arange(n)
    counts = np.unique(codes, return_counts=True)[1]
    cells = math.factorial(n)
    assert len(counts) == cells
    chi_square = ((counts - trials / cells) ** 2).sum() / (trials / cells)
    assert abs(chi_square - (cells - 1)) < 4.5 * math.sqrt(2 * (cells - 1))


def test_first_example_is_uniform() -> None:
    """Over epochs, each of 1,437 examples comes first equally often; 4.5 sigma."""
    n, epochs = 1437, 40_000
    firsts, _ = Order(n, n * epochs, seed=3).batch(0, rows=np.arange(epochs) * n)
    counts = np.bincount(firsts, minlength=n)
    chi_square = ((counts - epochs / n) ** 2).sum() / (epochs / n)
    assert abs(chi_square - (n - 1)) < 4.5 * math.sqrt(2 * (n - 1))


def test_large_epoch_has_no_more_adjacent_pairs_than_chance() -> None:
    """Neighbours in the data are neighbours in the order about twice per epoch, fixed points once."""
    n = 300_000
    pairs = fixed = 0
    for seed in range(4):
        indices, _ = Order(n, n, seed).batch(1)
        assert np.bincount(indices, minlength=n).max() == 1
        pairs += int((np.abs(np.diff(indices)) == 1).sum())
        fixed += int((indices == np.arange(n)).sum())
    assert pairs <= 22  # 8 expected
    assert fixed <= 14  # 4 expected


def test_billion_examples_need_no_memory() -> None:
    """Any step of 10⁹ examples comes in milliseconds, within range, without repeats."""
    indices, epochs = Order(10**9, 4096, seed=0).batch(10**12)
    assert indices.min() >= 0
    assert indices.max() < 10**9
    assert len(set(indices.tolist())) == 4096
    assert set(epochs.tolist()) == {4096 * 10**12 // 10**9}


def test_seeds_belong_to_example_and_epoch() -> None:
    """The augmentation of an example changes with the epoch and with nothing else."""
    order = Order(50, 8, seed=0)
    indices, epochs = (grid.ravel() for grid in np.meshgrid(np.arange(50), np.arange(4)))
    seeds = order.example_seeds(indices, epochs)
    assert seeds.shape == (200, 2)
    assert len(np.unique(seeds)) == 400
    np.testing.assert_array_equal(seeds[60:70], Order(50, 3, seed=0).example_seeds(indices[60:70], epochs[60:70]))


def test_fifty_thousand_and_three_examples_over_eight_hosts() -> None:
    """Cases D60, D62."""
    order = Order(50_003, 64, seed=0)
    shares = [set() for _ in range(8)]
    for step, host in itertools.product(range(50_003 // 64 + 1), range(8)):
        indices, epochs = order.batch(step, np.arange(host * 8, host * 8 + 8))
        shares[host].update(indices[epochs == 0].tolist())
    assert sum(map(len, shares)) == 50_003
    assert set().union(*shares) == set(range(50_003))


@pytest.mark.parametrize("sizes", [(0, 1), (1, 0), (2**62 + 1, 1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"Order\.(num_examples|batch_size): expected 1 to"):
        Order(*sizes, seed=0)
