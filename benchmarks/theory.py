"""The paper's theory measured: networks trained without and with orthogonal kernels, layer by layer.

    python benchmarks/theory.py --data-dir ../shared/data [--networks DIR]

vgg-mini and resnet-mini, CIFAR-10, seed 0, all convolutions of the main path, patches of 500 training images. One row
for each network and layer goes to benchmarks/results/theory.json.
"""

from pathlib import Path

import torch
from manifest import benchmark_parser, open_network, original_name
from result_files import ResultRow, write_results

from fedortho.engines.query import draw
from fedortho.experiments.theory import measure_theory
from fedortho.storage.records import to_json

OUT = Path(__file__).parent / "results" / "theory.json"
NETWORKS = {"without": "none", "with": "lazy-0.1"}  # orthogonality, and the variant of the manifest
IMAGES = 500


def main(words: list[str] | None = None) -> None:
    parser = benchmark_parser(__doc__)
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    rows: list[ResultRow] = []
    for model in ("vgg-mini", "resnet-mini"):
        for orthogonality, variant in NETWORKS.items():
            run = open_network(given.networks, original_name(model, variant=variant), given.data_dir)
            images = draw(run.load_data(given.data_dir).train, IMAGES, 0)
            for layer in measure_theory(run.load_model(), images, "all"):
                rows.append({"model": model, "orthogonality": orthogonality} | to_json(layer))
                print(layer, flush=True)
            what = f"the paper's theory, {IMAGES} training images of CIFAR-10"
            write_results(given.out, what, "python benchmarks/theory.py --data-dir ../shared/data", rows)


if __name__ == "__main__":
    main()
