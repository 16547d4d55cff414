"""The federation on Flower: one client app, one server app, three engines.

By default Flower and Ray look for updates, send telemetry and install packages; `switch_off` disables that and is
called before either is imported or started.
"""

from collections.abc import MutableMapping

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def switch_off(environ: MutableMapping[str, str]) -> None:
    """Disable telemetry, update checks and installations of Flower and Ray in this environment."""
    environ.update(SWITCHES)
