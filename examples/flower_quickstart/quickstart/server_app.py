"""The server app of Flower's quickstart; the lines marked (+) make the model and its clients forget."""

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg

import fedortho as fo  # (+)
from quickstart import task

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train with Flower's strategy, then forget."""
    torch.manual_seed(0)
    model = task.Net()
    strategy = FedAvg(fraction_evaluate=context.run_config["fraction-evaluate"])
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        train_config=ConfigRecord({"lr": context.run_config["learning-rate"]}),
        num_rounds=context.run_config["num-server-rounds"],
    )
    model.load_state_dict(result.arrays.to_torch_state_dict())

    unlearner = fo.Unlearner(grid, model)  # (+)
    few_images = {"epochs": context.run_config["forget-rounds"], "batch_size": 32, "crop": 0, "flip": 0.0}  # (+)
    forgotten = unlearner.forget(context.run_config["forget"], fo.make_method("regrow", few_images))  # (+)
    for name, net in (("trained", model), ("forgotten", forgotten.model)):
        print(f"{name}: accuracy by class", *(f"{accuracy:.0%}" for accuracy in accuracies(net)))
    print(f"{len(unlearner.confirmed)} clients have the model {forgotten.patch.after[:16]}")
    torch.save(forgotten.model.state_dict(), "final_model.pt")


def accuracies(model: torch.nn.Module) -> list[float]:
    """The accuracy on each class, over the test images of all nodes."""
    pixels, labels = task.load_datasets(0, 1)[1].tensors
    of_class = [labels == label for label in range(10)]
    return [task.test(model, [(pixels[rows], labels[rows])])[1] for rows in of_class]
