"""The federation on Flower: one client app, one server app, three engines.

Unless they are told not to, Flower and Ray look for updates, report their use and install packages; so
`switch_off` is called before either is imported or started.
"""

from collections.abc import MutableMapping

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def switch_off(environ: MutableMapping[str, str]) -> None:
    """Tell Flower and Ray to send nothing and to install nothing; before either is imported or started."""
    environ.update(SWITCHES)
