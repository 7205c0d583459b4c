"""Seconds by a number: from few measurements, with noise and hiccups, on a machine whose pace changes."""

from random import Random

import pytest

from saguaro.draft.policy.average import Average
from saguaro.draft.policy.cost import HICCUP, KEPT_AT, Pace, SecondsByCount


def test_before_any_measurement_everything_is_free() -> None:
    assert (SecondsByCount().at(5), SecondsByCount().slope()) == (0.0, 0.0)


def test_one_number_says_nothing_of_others() -> None:
    """Unless time is in proportion."""
    for is_proportional, at in ((False, 3.0), (True, 12.0)):
        known = SecondsByCount(is_proportional=is_proportional)
        for _ in range(50):
            known.add(2, 3.0)
        assert known.at(2) == pytest.approx(3.0)
        assert known.at(8) == pytest.approx(at)


@pytest.mark.parametrize("is_proportional", [False, True])
def test_a_line_through_noise(is_proportional: bool) -> None:
    chance, known = Random(0), SecondsByCount(is_proportional=is_proportional)
    for _ in range(400):
        count = chance.randint(1, 6)
        known.add(count, (3.0 + count) * chance.gauss(1.0, 0.05))
    assert known.slope() == pytest.approx(1.0, rel=0.1)
    for n in (1, 4, 2.5, 9):
        assert known.at(n) == pytest.approx(3.0 + n, rel=0.04)


def test_steps_of_a_staircase_are_known_one_by_one() -> None:
    """Products of up to four rows take the same time, as on vector units."""
    known = SecondsByCount()
    for _ in range(40):
        for n in (1, 2, 4, 5, 8):
            known.add(n, 1.0 if n <= 4 else 2.0)
    assert known.at(4) == pytest.approx(1.0, rel=0.06)
    assert known.at(5) == pytest.approx(2.0, rel=0.06)


def test_it_never_gets_faster_with_more() -> None:
    known = SecondsByCount()
    for n in (1, 5) * 20:
        known.add(n, 6.0 - n)
    assert known.slope() == 0.0


def test_a_hiccup_counts_little() -> None:
    known = SecondsByCount()
    for _ in range(40):
        known.add(3, 1.0)
    known.add(3, 1000.0)
    assert known.at(3) <= 1.0 + (HICCUP - 1) * (1 - KEPT_AT) * 4


def test_a_slow_machine_is_slow_in_everything() -> None:
    """What is not measured again is expected to have become slower too, for the most part."""
    pace = Pace()
    often, seldom = SecondsByCount(pace, is_reference=True), SecondsByCount(pace, is_proportional=True)
    for _ in range(50):
        often.add(1, 1.0)
        seldom.add(2, 0.5)
    for _ in range(200):
        often.add(1, 1.5)
    assert often.at(1) == pytest.approx(1.5, rel=0.02)
    assert seldom.at(2) == pytest.approx(0.75, rel=0.15)
    for _ in range(200):
        often.add(1, 1.0)
    assert seldom.at(2) == pytest.approx(0.5, rel=0.06)


def test_an_average_forgets_slowly() -> None:
    average = Average()
    assert average.mean(0.7) == 0.7
    for value in (3.0, 0.0, 5.0):
        average.add(value)
    assert average.mean(0.7) == pytest.approx((0.98**2 * 3.0 + 5.0) / (0.98**2 + 0.98 + 1))
    for _ in range(1000):
        average.add(2.0)
    assert average.mean(0.7) == pytest.approx(2.0)
    assert average.n == pytest.approx(50)
