"""Tables of the paper that were reproduced: `fedortho reproduce` wrote the files in benchmarks/results/reproduce."""

from result_text import RESULTS, grid, origin, read

from fedortho.experiments.experiment import EXPERIMENTS, ExperimentResults, check_claims, load_experiment
from fedortho.experiments.results_table import attack_words, claim_words, results_table
from fedortho.storage.records import read_record


def reproduced() -> str:
    """Every table that was run, the paper's values in brackets beside ours, and each claim in words."""
    parts = []
    for path in sorted((RESULTS / "reproduce").glob("*.json"), key=lambda path: path.name):
        name = next(name for name in EXPERIMENTS if path.name.startswith(f"{name}-"))
        found = read_record(ExperimentResults, path)
        seeds = ",".join(dict.fromkeys(str(row.seed) for row in found.rows))
        experiment = load_experiment(name, found.scale, seeds=seeds)
        header, *rows = results_table(experiment, found)
        networks = " and ".join(dict.fromkeys(f"{one.model} on {one.data}" for one in experiment.networks))
        title = f"**{name}** ({experiment.what}). Here: {networks}, seeds {seeds}; {experiment.printed_words}."
        claims = "\n".join(f"- {claim_words(claim)}" for claim in check_claims(experiment, found.rows))
        about = origin(read(f"reproduce/{path.stem}"))
        mia = f"MIA confidence: {attack_words(found)}."
        parts.append(f"{title}\n\n{grid(header, rows)}\n\n{mia}\n\n{claims}{about}")
    return "\n\n".join(parts) or "None yet."
