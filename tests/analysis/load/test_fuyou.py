"""Fuyou's cost model beside what its authors published."""

from statistics import median

from analysis.load import fuyou


def test_the_model_is_near_the_published_table_and_says_what_was_not_fitted() -> None:
    """The one constant is fitted on one GPU's points alone; those of several are predicted."""
    points = fuyou.published()
    assert len(points) == 36
    alone = [point for point in points if point.gpus == 1]
    rate = fuyou.fitted(alone)
    several = [point for point in points if point.gpus > 1]
    assert median(map(abs, fuyou.errors(points, rate))) < 0.15
    assert median(map(abs, fuyou.errors(alone, rate))) < 0.05
    assert 0.2 < median(map(abs, fuyou.errors(several, rate))) < 0.5
