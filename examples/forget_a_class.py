"""Forget a class and measure how much of it is left: python examples/forget_a_class.py."""

import argparse

import fedortho as fo


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="fashion-mini", help="fashion-mini (embedded), digits, or a folder of images")
    parser.add_argument("--forget", default="class:Dress", help="the request: which images to forget")
    parser.add_argument("--epochs", type=int, default=2)
    given = parser.parse_args()

    images = fo.load_images(given.data)
    recipe = fo.Recipe(epochs=given.epochs, crop=1, flip=0.0)
    fresh = fo.build_model("vgg-mini", num_classes=images.train.classes, channels=images.train.shape[0])
    model = fo.fit(fresh, images.train, recipe)
    # Hide it by forward passes only (an error with the reason if no edit meets target and budget); the default erases.
    result = fo.forget(model, images, given.forget, level="hide")
    print(f"{result.method}: {len(result.trials)} trials, {result.cost.seconds:.1f} s")

    # The verdict compares with a reference model: the same recipe on the retain set alone.
    _, retain = fo.ForgetRequest.parse(given.forget).split(images.train)
    reference = fo.fit(fresh, retain, recipe)

    for name, one in (("before", model), ("after", result.model), ("retrained", reference)):
        found = fo.accuracies_of(one, images, given.forget)
        print(f"{name:10} forget {found.forget:.1%}  retain {found.retain:.1%}")
    verdict = fo.judge(result.model, images, given.forget, original=model, reference=reference)
    print(verdict.sentence)
    for audit in verdict.audits:
        print(f"{audit.name} {audit.outcome}: {audit.finding}")
    print(verdict.advice)


if __name__ == "__main__":
    main()
