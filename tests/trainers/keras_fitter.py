"""Tries what a batch may be, and the arguments of `fit`, with Keras' backend of this process. Prints JSON with the
batches that each case trained on and validated with, or its error.

Arguments: JSON with the URLs of the feeds in test_keras_fit.py.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras_trainer import Phases

import penstock

CLASS_WEIGHT = {0: 1.0, 1: 5.0, 2: 7.0}


class Watching(keras.Model):  # type: ignore[misc]
    """Records all arrays of its batches, in lists. It runs eagerly, so that a step has arrays."""

    def train_step(self, *arguments: Any) -> Any:
        self.trained[-1].append(listed(arguments[-1]))
        return super().train_step(*arguments)

    def test_step(self, *arguments: Any) -> Any:
        self.validated[-1].append(listed(arguments[-1]))
        return super().test_step(*arguments)


def listed(batch: Any) -> Any:
    return keras.tree.map_structure(lambda array: np.asarray(keras.ops.convert_to_numpy(array)).tolist(), batch)


def model_of(outputs: int, *, inputs: bool = False) -> Watching:
    x: Any = {"a": keras.Input((2,)), "b": keras.Input((1,))} if inputs else keras.Input((2,))
    joined = keras.layers.Concatenate()([x["a"], x["b"]]) if inputs else x
    model = Watching(x, keras.layers.Dense(outputs)(joined))
    loss = "mse" if outputs == 1 else keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("sgd", loss, run_eagerly=True)
    model.trained, model.validated = [], []
    return model


class Cases:
    """Each method is a case: it trains, and returns what is to be printed."""

    def __init__(self, urls: dict[str, str]) -> None:
        self.urls = urls

    def of(self, feed: str, outputs: int = 1, map: Callable[[Any], Any] | None = None, **options: Any) -> Any:
        """Train a model on a feed, and return what it was given."""
        model = model_of(outputs, inputs=feed == "inputs")
        with penstock.connect(self.urls[feed]) as connection:
            model.fit(connection.keras(map), verbose=0, callbacks=[Phases()], **{"epochs": 2, **options})
        return {"trained": model.trained, "validated": model.validated}

    def classes_with_weights(self) -> Any:
        return self.of("classes", 3, class_weight=CLASS_WEIGHT)

    def samples_with_weights(self) -> Any:
        return self.of("weighted")

    def both_weights(self) -> Any:
        return self.of("weighted", class_weight=CLASS_WEIGHT)

    def a_dict_of_inputs(self) -> Any:
        return self.of("inputs")

    def arranged(self) -> Any:
        return self.of("four", map=lambda batch: (batch[0], batch[1], batch[3]))

    def another_feed_for_validation(self) -> Any:
        with penstock.connect(self.urls["weighted"]) as other:
            return self.of("classes", 3, class_weight=CLASS_WEIGHT, validation_data=other.keras())

    def weights_only_in_the_first_fit(self) -> Any:
        model = model_of(3)
        with penstock.connect(self.urls["classes"]) as connection:
            data = connection.keras()
            model.fit(data, verbose=0, callbacks=[Phases()], class_weight=CLASS_WEIGHT)
            model.fit(data, verbose=0, callbacks=[Phases()])
        return {"trained": model.trained, "validated": []}

    def a_rank(self) -> Any:
        return self.beside({"rank": 0, "world_size": 2}, {"rank": 1, "world_size": 2})

    def a_group(self) -> Any:
        return self.beside({"group": "all"}, {"group": "all"})

    def beside(self, own: dict[str, Any], others: dict[str, Any]) -> Any:
        """Train on two epochs while a thread reads the stream too. `validated` is what that has read."""
        model, read, connections = model_of(3), [], {}

        def connect(name: str, options: dict[str, Any]) -> None:
            connections[name] = penstock.connect(self.urls["classes"], **options)

        together = [threading.Thread(target=connect, args=each) for each in (("own", own), ("other", others))]
        for thread in together:
            thread.start()
        for thread in together:
            thread.join()

        ended = threading.Event()

        def read_on() -> None:
            for epoch in range(2):
                batches = connections["other"].batches()
                # One member of a group may get all batches of an epoch, and Keras fails if it gets none.
                while "group" in own and connections["own"].stats()["epoch"] < epoch and not ended.wait(0.01):
                    pass
                read.append([listed(batch) for batch in batches])

        reader = threading.Thread(target=read_on)
        reader.start()
        try:
            model.fit(connections["own"].keras(), epochs=2, verbose=0, callbacks=[Phases()])
        finally:
            ended.set()
        reader.join()
        for connection in connections.values():
            connection.close()
        return {"trained": model.trained, "validated": read}

    def x_alone(self) -> Any:
        with penstock.connect(self.urls["four"]) as connection:
            data = connection.keras(lambda batch: keras.ops.multiply(batch[0], 2.0))
            return {"predicted": len(model_of(1).predict(data, verbose=0))}

    def y_besides(self) -> Any:
        return self.of("classes", 3, y=np.zeros(4))

    def sample_weight_besides(self) -> Any:
        return self.of("classes", 3, sample_weight=np.zeros(4))

    def endless(self) -> Any:
        return self.of("endless")

    def endless_validation(self) -> Any:
        with penstock.connect(self.urls["endless"]) as other:
            return self.of("classes", 3, validation_data=other.keras())

    def four_parts(self) -> Any:
        return self.of("four")

    def four_parts_of_map(self) -> Any:
        return self.of("four", map=lambda batch: (*batch[:3], batch[3]))

    def forgotten_return(self) -> Any:
        return self.of("four", map=lambda batch: None)


def main() -> None:
    cases, results = Cases(json.loads(sys.argv[1])), {}
    for name in vars(Cases):
        if name not in ("of", "beside") and not name.startswith("_"):
            try:
                results[name] = getattr(cases, name)()
            except Exception as error:
                results[name] = {"error": f"{type(error).__name__}: {error}"}
    print(json.dumps(results))


if __name__ == "__main__":
    main()
