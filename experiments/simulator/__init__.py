"""One training step, simulated event by event on a cluster that need not exist."""

from experiments.simulator.prediction import Prediction, predict

__all__ = ["Prediction", "predict"]
