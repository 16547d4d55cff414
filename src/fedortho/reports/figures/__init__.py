"""Figures of real runs: functions that take values and return matplotlib's Figure; they neither show nor save it."""

from fedortho.reports.figures.activations import activation_figure, class_peaks, grad_cam, grad_cam_figure
from fedortho.reports.figures.costs import cost_figure, training_figure
from fedortho.reports.figures.kernels import gram_figure, likeness_by_depth_figure, likeness_curves_figure
from fedortho.reports.figures.results import (
    class_accuracy_figure,
    confidence_figure,
    confusion_figure,
    frontier_figure,
    probe_figure,
    relearn_figure,
)
from fedortho.reports.figures.style import finding_of, png

__all__ = [
    "activation_figure",
    "class_accuracy_figure",
    "class_peaks",
    "confidence_figure",
    "confusion_figure",
    "cost_figure",
    "finding_of",
    "frontier_figure",
    "grad_cam",
    "grad_cam_figure",
    "gram_figure",
    "likeness_by_depth_figure",
    "likeness_curves_figure",
    "png",
    "probe_figure",
    "relearn_figure",
    "training_figure",
]
