"""A verdict as a run keeps it, and a name that would be dangerous if it were not escaped."""

from typing import Any

EVIL = "<script>alert('x')</script>"
VERDICT: dict[str, Any] = {
    "schema": 1,
    "request": "class:3",
    "method": "hide",
    "sentence": "The model no longer answers 3.",
    "label": "passed 1 of 3, 1 not run",
    "advice": "Retrain: a probe still finds it.",
    "metrics": [
        {"name": "forget-accuracy", "title": "forget accuracy", "value": 0.0125, "error": "", "reference": 0.0}
        | {"ideal": None, "low": 0.0, "high": 1.0, "direction": "as retrain", "source": "paper", "images": 180},
        {"name": "mia", "title": "membership", "value": None, "error": "too few images", "reference": None}
        | {"ideal": 0.5, "low": 0.0, "high": 1.0, "direction": "as retrain", "source": "paper", "images": None},
    ],
    "audits": [
        {
            "name": "probe",
            "outcome": "FAIL",
            "says": "a probe recalls 80 %",
            "value": 0.3,
            "limit": 0.05,
            "seconds": 1.5,
        }
        | {"forgot": 0.8, "original": 0.9, "reference": 0.5}
        | {"details": {"stages": {"forgot": {"a": 0.4, "b": 0.8}, "reference": {"a": 0.4, "b": 0.5}}}},
        {"name": "norms", "outcome": "PASS", "says": "nothing came back", "value": 0.0, "limit": 0.02, "seconds": 0.5}
        | {"title": "batch-norm and kernel-norm attacks", "forgot": 0.005, "original": 0.921, "reference": 0.0},
        {"name": "relearn", "outcome": "NOT RUN", "says": "ask for it", "value": None, "limit": None, "seconds": 0.0}
        | {"details": {"steps": 60, "relearning": {"10": {"forgot": 12, "reference": None}}}},
    ],
    "cost": {"seconds": 2.0, "images_read": 1500, "images_trained": 0, "flops": 1e9},
    "not_tested": ["backdoors"],
    "settings": {"target": 0.01},
    "environment": {"versions": {"torch": "2"}},
}
