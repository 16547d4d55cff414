"""Who may import whom: only what stands nearer the ground (CONTRIBUTING.md explains the tiers)."""

import ast
from pathlib import Path

import fedortho

BASELINES = {  # none of them imports another
    *("bad_teacher", "class_pruning", "finetune", "fused", "logit_mask", "negate"),
    *("federaser", "neggrad", "retrain", "salun", "ssd", "unsir"),
}
TIERS = [
    {"errors"},
    {
        "files",
        "settings",
        "ortho",
        "models",
        "structure",
        "data",
        "partition",
        "adapters",
        "devices",
        "archive",
        "markup",
    },
    {"weights", "recipe", "results", "decode", "sites", "request", "federation", "lessons"},
    {"metrics", "journal", "signature"},
    {"scores"},
    {"mia"},
    {"sources", "train", "observe", "tail", "lira"},
    {"rank", "ledger", "scrub", "accuracies"},
    {"prune", "runs"},
    {"erase"},
    {"probe"},
    {"engine"},
    {"calibrate", "cost", "shadows"},
    {"figures/style"},
    {"figures/activations", "figures/costs", "figures/kernels", "figures/results"},
    {"figures/__init__"},
    {"plan"},
    {"methods/contract", "methods/fedortho"},
    {f"methods/{name}" for name in BASELINES},
    {"methods/__init__"},
    {"serve", "federated/__init__", "federated/wire"},
    {"federated/holder", "federated/exchange", "federated/rounds", "screen"},
    {"federated/members"},
    {"federated/client", "federated/flower"},
    {"federated/worker"},
    {"federated/inprocess"},
    {"federated/server"},
    {"federated/launch", "audits/contract"},
    {"audits/limits", "audits/sight", "measure", "bundle", "references"},
    {"audits/probe", "audits/norms", "audits/relearn", "audits/distance", "audits/copies", "audits/retention"},
    {"audits/membership", "replay"},
    {"audits/__init__", "compare", "overview", "presets"},
    {"verify"},
    {"illustrate"},
    {"report"},
    {"federated/deploy", "federated/jobs", "tune", "experiments/relations"},
    {"experiments/__init__"},
    {"experiments/runner"},
    {"cli_flags", "board"},
    {"cli_methods", "cli_evidence", "cli_report", "cli_reproduce", "cli_verdict", "cli_federation"},
    {"cli_forget"},
    {"__init__", "cli"},
    {"__main__"},
]
PACKAGE = Path(fedortho.__file__).parent
HEAVY = {
    "flwr",
    "matplotlib",
    "pyarrow",
    "PIL",
    "sklearn",
    "datasets",
    "torch_pruning",
    "cryptography",
    "captum",
    "selenium",
    "tensorboard",
}

ON_THE_CPU = {  # what they are given has left the device already: answers, sums, weights
    *("data", "lira", "mia", "rank", "audits/distance", "audits/probe", "federated/holder", "federated/wire"),
    *("figures/activations", "methods/class_pruning", "methods/fedortho", "methods/ssd"),
}


def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found.append(node.module or "")
    return found


def test_every_module_imports_only_from_tiers_below_its_own() -> None:
    tier_of = {name: number for number, names in enumerate(TIERS) for name in names}
    modules = {str(path.relative_to(PACKAGE).with_suffix("")): path for path in PACKAGE.rglob("*.py")}
    assert set(modules) == set(tier_of), "each module has its place in TIERS"
    for module, path in modules.items():
        for name in imports(ast.parse(path.read_text())):
            assert name != "fedortho", f"{path.stem} imports the package itself, and with it every tier"
            if name.startswith("fedortho."):
                below = name.removeprefix("fedortho.").replace(".", "/")
                below = below if below in tier_of else f"{below}/__init__"
                assert tier_of[below] < tier_of[module] or below == "errors", f"{module} may not import {below}"


def test_heavy_libraries_load_only_when_used_and_unsafe_ones_never() -> None:
    for path in PACKAGE.rglob("*.py"):
        tree = ast.parse(path.read_text())
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for name in imports(ast.Module(top, [])):
            is_grid = path.stem == "inprocess" and name.startswith("flwr.")  # its class is one of Flower's
            assert name.split(".")[0] not in HEAVY or is_grid, f"{path.stem} imports {name} at the top"
            assert name != "fedortho.federated.inprocess", f"{path.stem} loads Flower whether it is used or not"
        assert not {"pickle", "torchvision"} & {name.split(".")[0] for name in imports(tree)}


def test_numbers_come_to_the_cpu_before_they_become_float64_which_mps_lacks() -> None:
    for path in PACKAGE.rglob("*.py"):
        lines = path.read_text().splitlines()
        calls = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        methods = [(call.func, ast.unparse(call)) for call in calls if isinstance(call.func, ast.Attribute)]
        for method, words in methods:
            if method.attr == "double" or (method.attr in ("to", "type") and "float64" in words):
                came = ".cpu()" in ast.unparse(method.value) or "# on the CPU" in lines[method.lineno - 1]
                module = str(path.relative_to(PACKAGE).with_suffix(""))
                assert came or module in ON_THE_CPU, f"{module}: {words} fails on MPS; call .cpu() first"
