"""The table of membership attacks on samples and a client."""

from typing import Any

from result_text import RESULTS, grid, origin, read

NAMES = {"drawn": "100 drawn", "memorised": "100 most memorised", "client": "one client"}
ABOUT = (
    "U-LiRA on {what}: images under models that unlearned them against the same images under models that never had "
    "them (0.5: not told apart; C4 passes from 0.4 to 0.6). Published settings, nothing tuned. The client's images "
    "({client}) are unlearned centrally, as rows. `original` is untouched. Accuracies in %: images unlearned / of the "
    "request and never trained on / retained / test. {missing}"
)
METHODS = 20


def _cell(row: dict[str, Any], key: str) -> str:
    low, high = row["attack"][f"{key}, 95 %"]
    return f"{row['attack'][key]:.3f} ({low:.3f} to {high:.3f})"


def membership() -> str:
    """One row for each request and method."""
    if not (RESULTS / "membership.json").exists():
        return "The benchmark has not been run."
    result, rows = read("membership"), []
    retraining = {row["request"]: row["flops"] for row in result["rows"] if row["method"] == "retrain"}
    for row in result["rows"]:
        shares = " / ".join(f"{100 * row['accuracies'][key]:.0f}" for key in ("forget", "never", "retain", "test"))
        whole = retraining.get(row["request"])
        cost = f"{row['flops'] / whole:.1%}" if whole and row["changed"] == 1 else "–"  # refusals are not metered
        auc = row["attack"]["AUC"]
        verdict = "PASS" if abs(auc - 0.5) <= 0.1 else "FAIL"
        changed = "" if row["changed"] == 1 else f" (refuses on {1 - row['changed']:.0%} of the models)"
        found = [_cell(row, "AUC"), _cell(row, "true positives at 1 % false"), verdict]
        rows.append([NAMES[row["request"]], f"{row.get('label', row['method'])}{changed}", *found, shares, cost])
    header = ["request", "method", "AUC (95 %)", "true positives at 1 % false (95 %)", "by C4's limit"]
    return grid([*header, "accuracies", "FLOPs of retraining"], rows) + origin(result)


def membership_setting() -> str:
    """How it was measured, the self-test, and what was not run."""
    if not (RESULTS / "membership.json").exists():
        return "The benchmark has not been run."
    result = read("membership")
    rows = {(row["request"], row["method"]): row for row in result["rows"]}
    lacking = METHODS * len(NAMES) - len(rows)
    missing = f"{lacking} of {METHODS * len(NAMES)} rows were not run for time." if lacking else ""
    client = next((f"{row['images']}" for row in rows.values() if row["request"] == "client"), "not run")
    text = ABOUT.format(what=result["what"], client=client, missing=missing).strip()
    if (tested := rows.get(("memorised", "retrain"))) is None:
        return text
    untouched, retrained = (rows["memorised", name]["attack"]["AUC"] for name in ("original", "retrain"))
    holds = abs(untouched - 0.5) > 0.1 >= abs(retrained - 0.5)
    said = f"**Self-test on the {tested['images']} most memorised images:** untouched {untouched:.3f} must fail, "
    return f"{text}\n\n{said}retrained {retrained:.3f} must pass: it {'holds' if holds else 'does not hold'}."


def membership_federation() -> str:
    """What the attack finds of a client in federations as trained."""
    result = read("membership-clients")
    (row,) = (each for each in result["rows"] if each["method"] == "original")
    low, high = row["attack"]["AUC, 95 %"]
    shares = [f"{100 * row['accuracies'][key]:.0f} %" for key in ("forget", "never", "retain")]
    return (
        f"**In a federation** ({result['what']}) the attack on models as trained has an AUC of "
        f"{row['attack']['AUC']:.3f} ({low:.3f} to {high:.3f}): it does not find the client at all, so C4 is "
        f"INCONCLUSIVE there for every method, FedEraser among them. Accuracies on the client's images: {shares[0]} "
        f"where it took part, {shares[1]} where not; {shares[2]} on the others' images." + origin(result)
    )
