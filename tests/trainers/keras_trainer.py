"""Trains a model that is not built yet, with Keras' backend of this process, and prints which batches it was given.

Its stdin is JSON: the URLs of feeds, and a list of cases. Prints a line of JSON for each case: the number
of the first sample of each batch, in lists, one for each epoch that Keras trained, and one for each validation.
"""

from __future__ import annotations

import contextlib
import json
import sys
import warnings
from typing import Any

import keras
import numpy as np

import penstock
import penstock.keras

EPOCHS = 3


class Watching(keras.Sequential):  # type: ignore[misc]
    """Records its batches. It runs eagerly, so that a step has arrays."""

    def train_step(self, *arguments: Any) -> Any:
        self.trained[-1].append(first(arguments[-1]))
        return super().train_step(*arguments)

    def test_step(self, *arguments: Any) -> Any:
        self.validated[-1].append(first(arguments[-1]))
        return super().test_step(*arguments)


class Phases(keras.callbacks.Callback):  # type: ignore[misc]
    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.model.trained.append([])

    def on_test_begin(self, logs: Any = None) -> None:
        self.model.validated.append([])


def first(batch: Any) -> int:
    return int(np.asarray(keras.ops.convert_to_numpy(batch[1])).reshape(-1)[0])


def model_of(strategy: bool) -> Watching:
    scope: Any = contextlib.nullcontext()
    if strategy:
        import tensorflow as tf

        scope = tf.distribute.MirroredStrategy(["cpu:0"]).scope()
    with scope:
        model = Watching([keras.layers.Dense(1)])
        model.compile("sgd", "mse", run_eagerly=True)
    model.trained, model.validated = [], []
    return model


def data_of(connection: penstock.Connection, route: str) -> Any:
    if route == "keras":
        return connection.keras()
    if route == "dataset":
        return connection.dataset()
    from torch.utils.data import DataLoader

    return DataLoader(connection.torch(), batch_size=None)


def train(url: str, case: dict[str, Any]) -> dict[str, Any]:
    """Run a case: `route`, and perhaps `state`, `steps`, `validation`, `epochs`, `strategy`, `fits` and `predicts`."""
    model, route = model_of(case.get("strategy", False)), case["route"]
    options: dict[str, Any] = {"epochs": case.get("epochs", EPOCHS), "steps_per_epoch": case.get("steps")}
    with contextlib.ExitStack() as stack:
        connection = stack.enter_context(penstock.connect(url, workers=case.get("workers"), state=case.get("state")))
        if case.get("validation"):
            other = stack.enter_context(penstock.connect(url, workers=case.get("workers")))
            options |= {"validation_data": data_of(other, route), "validation_steps": case["validation"]}
        data = data_of(connection, route)
        if case.get("predicts"):
            return {"predicted": int(model.predict(data, verbose=0).shape[0])}
        options["epochs"] //= case.get("fits", 1)
        for _ in range(case.get("fits", 1)):
            model.fit(data, verbose=0, shuffle=route == "keras", callbacks=[Phases()], **options)
    return {"trained": model.trained, "validated": model.validated}


def main() -> None:
    urls, cases = json.load(sys.stdin)
    warnings.filterwarnings("ignore", message=r"\s*Your input ran out of data")
    for case in cases:
        try:
            result: dict[str, Any] = train(urls[case["feed"]], case)
        except Exception as error:
            result = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(result), flush=True)
    print(json.dumps(sorted({"tensorflow", "torch"} & {*sys.modules})), flush=True)


if __name__ == "__main__":
    main()
