import pytest

from hf_eagle3.policy_eagle3 import AutoPolicy


def simulate(policy, num_steps, tokens, seconds):
    """Runs a policy on a machine where steps of a size bring so many tokens in so many seconds; returns its choices."""
    chosen = []
    for step in range(num_steps):
        size = policy.choose()
        chosen.append(size)
        policy.record(size, tokens(size, step), seconds(size, step))
    return chosen


def rate_of(chosen, gain, cost):
    return sum(gain[size] for size in chosen) / sum(cost[size] for size in chosen)


@pytest.mark.parametrize(
    ("gain", "cost", "best"),
    [
        ({0: 1, 2: 1, 8: 1, 24: 1}, {0: 1, 2: 1.5, 8: 2, 24: 3}, 0),  # a useless draft
        ({0: 1, 2: 1.8, 8: 2.5, 24: 4}, {0: 1, 2: 1.2, 8: 1.3, 24: 1.5}, 24),  # a verify costs little
        ({0: 1, 2: 1.8, 8: 2.5, 24: 3}, {0: 1, 2: 1.2, 8: 1.4, 24: 3}, 8),
        ({0: 1, 2: 1.8, 8: 2, 24: 2.2}, {0: 1, 2: 1.2, 8: 2, 24: 3}, 2),
    ],
)
def test_finds_the_best_size_and_stays_near_its_rate(gain, cost, best):
    policy = AutoPolicy(24)
    assert policy.sizes == [0, 2, 8, 24]

    def tokens(size, step):  # 1, 2 or 3 times, in turn, around the mean
        return 1 + (gain[size] - 1) * (0.5, 1, 1.5)[step % 3]

    def seconds(size, step):
        return cost[size] * (10 if step % 50 == 7 else 1)  # now and then a pause

    chosen = simulate(policy, 1000, tokens, seconds)
    assert chosen[100:].count(best) > 0.85 * 900
    assert rate_of(chosen[50:], gain, cost) > 0.95 * gain[best] / cost[best]  # once it has found out


def test_follows_a_change():
    policy = AutoPolicy(24)
    simulate(policy, 300, lambda size, _: 1, lambda size, _: 1 + size)
    assert policy.best == 0
    chosen = simulate(policy, 3000, lambda size, _: 1 + size, lambda size, _: 1)
    assert chosen[-200:].count(24) > 150


def test_small_budgets_and_unknown_sizes():
    assert AutoPolicy(1).sizes == [0, 1]
    policy = AutoPolicy(3)
    assert policy.sizes == [0, 1, 3]
    policy.record(7, 1, 1)  # of a step that was cut short
    simulate(policy, 100, lambda size, _: 1 + size, lambda size, _: 1)
    assert policy.best == 3


def test_steps_without_a_record_do_not_stall():
    policy = AutoPolicy(24)
    assert {policy.choose() for _ in range(50)} == {0}  # each call ended before a step was measured
    simulate(policy, 100, lambda size, _: 1 + size, lambda size, _: 1)
    assert policy.best == 24
