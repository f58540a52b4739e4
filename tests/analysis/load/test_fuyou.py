"""Fuyou's cost model beside what its authors published."""

from statistics import median

from analysis.load import fuyou

#: The issue's: the median of errors over all published points.
MOST = 0.15


def test_the_model_is_near_the_published_table_and_says_what_was_not_fitted() -> None:
    """The one constant is fitted on one GPU's points alone; those of several are predicted."""
    points = fuyou.published()
    assert len(points) == 36
    alone = [point for point in points if point.gpus == 1]
    rate = fuyou.fitted(alone)
    several = [point for point in points if point.gpus > 1]
    assert median(map(abs, fuyou.errors(points, rate))) < MOST
    assert median(map(abs, fuyou.errors(alone, rate))) < 0.05
    assert 0.2 < median(map(abs, fuyou.errors(several, rate))) < 0.5


def test_more_ssds_never_take_longer_and_the_gain_is_largest_at_small_batches() -> None:
    points = [point for point in fuyou.published() if point.table == "ssds"]
    gains = []
    for batch in (32, 48, 64):
        of_batch = sorted((p for p in points if p.batch == batch), key=lambda p: p.ssds)
        tflops = [fuyou.predicted(point, 1e9) for point in of_batch]
        assert tflops == sorted(tflops)
        gains.append(tflops[-1] / tflops[0])
    assert gains == sorted(gains, reverse=True)
