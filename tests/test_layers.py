"""Who may import whom: a package imports only packages before it (docs/architecture.md shows them in a picture)."""

import ast
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import fedortho

PACKAGES = [
    "storage",
    "data",
    "models",
    "training",
    "statistics",
    "engines",
    "unlearning",
    "methods",
    "runs",
    "federated",
    "evaluation",
    "audits",
    "requests",
    "reports",
    "evidence",
    "experiments",
    "cli",
]
ROOT = Path(fedortho.__file__).parent
GROUND = {"errors", "devices"}  # modules that every package may import
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in ROOT.rglob("*.py")}
HEAVY = {
    "flwr",
    "jinja2",
    "matplotlib",
    "pyarrow",
    "PIL",
    "sklearn",
    "scipy",
    "datasets",
    "torch_pruning",
    "cryptography",
    "captum",
    "selenium",
}


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


@cache
def imports(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            found += [node.module or ""]
            if node.module and f"{node.module.removeprefix('fedortho.')}.__init__" in MODULES:
                names = [f"{node.module}.{alias.name}" for alias in node.names]
                found += [name for name in names if name.removeprefix("fedortho.") in MODULES]
    return found


def own_imports(module: str) -> list[str]:
    names = [name for name in imports(tree_of(MODULES[module])) if name.split(".")[0] == "fedortho"]
    return [name.partition(".")[2] for name in names]


def test_every_module_is_in_a_package_of_the_list() -> None:
    assert {module.split(".")[0] for module in MODULES} == {*PACKAGES, *GROUND, "__init__", "__main__"}


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_imports_only_packages_before_it(package: str) -> None:
    allowed = {*PACKAGES[: PACKAGES.index(package) + 1], *GROUND}
    for module in MODULES:
        if module.split(".")[0] == package:
            for name in own_imports(module):
                assert name.split(".")[0] in allowed, f"{module} may not import {name or 'fedortho itself'}"


def test_modules_of_a_package_do_not_import_each_other_in_circles() -> None:
    below = {module: {n if n in MODULES else f"{n}.__init__" for n in own_imports(module)} for module in MODULES}
    done: set[str] = set()
    while ready := [module for module, needs in below.items() if module not in done and needs <= done | {module}]:
        done |= set(ready)
    assert done == set(MODULES), f"in a circle, or behind one: {sorted(set(MODULES) - done)}"


def test_a_public_name_is_defined_in_one_module_only() -> None:
    defined: Counter[str] = Counter()
    for path in MODULES.values():
        for node in tree_of(path).body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                defined[node.name] += 1
    assert [name for name, times in defined.items() if times > 1] == []


def test_heavy_libraries_load_only_when_used_and_unsafe_ones_never() -> None:
    for path in MODULES.values():
        tree = tree_of(path)
        top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
        for name in imports(ast.Module(top, [])):
            is_grid = path.stem == "local_grid" and name.startswith("flwr.")  # its class is one of Flower's
            assert name.split(".")[0] not in HEAVY or is_grid, f"{path.stem} imports {name} at the top"
            assert name != "fedortho.federated.local_grid", f"{path.stem} loads Flower whether it is used or not"
        assert not {"pickle", "torchvision"} & {name.split(".")[0] for name in imports(tree)}


def test_what_is_printed_passes_through_one_function() -> None:
    """`say` and `warn` print any text, foreign too, as one line without markup: nothing needs escaping."""
    for module, path in MODULES.items():
        assert "rich.markup" not in imports(tree_of(path)), f"{module}: say() takes plain text; give a style as a pair"
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        printed = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr == "print"]
        for call in printed:
            assert isinstance(call.args[0], ast.Call | ast.Name), f"{module}: {ast.unparse(call)}: use say() or warn()"


ON_THE_CPU = {  # what these are given has left the device already: answers, sums, weights
    *("data.images", "evaluation.lira", "evaluation.membership_attacks", "unlearning.rank", "audits.distance"),
    *("audits.probe", "federated.client", "federated.wire"),
    *("methods.class_pruning", "methods.hide", "methods.directions", "methods.paper", "methods.ssd"),
}


def test_numbers_come_to_the_cpu_before_they_become_float64_which_mps_lacks() -> None:
    for module, path in MODULES.items():
        lines = path.read_text().splitlines()
        calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
        methods = [(call.func, ast.unparse(call)) for call in calls if isinstance(call.func, ast.Attribute)]
        for method, words in methods:
            if method.attr == "double" or (method.attr in ("to", "type") and "float64" in words):
                came = ".cpu()" in ast.unparse(method.value) or "# on the CPU" in lines[method.lineno - 1]
                assert came or module in ON_THE_CPU, f"{module}: {words} fails on MPS; call .cpu() first"
