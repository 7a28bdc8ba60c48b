"""Train a classifier on rows of token ids, which are padded to one of a few lengths. Show the text beside them.

python train.py
"""

from pathlib import Path

import keras

import penstock

REVIEWS = Path(__file__).with_name("reviews.py")
VOCABULARY = 10


def main():
    train = penstock.dataset(f"{REVIEWS}:feed", workers=2)
    for batch in train.take(1):
        print(batch["tokens"].shape, batch["text"][0].numpy().decode())

    tokens = keras.Input((None,), dtype="int32")
    embedded = keras.layers.Embedding(VOCABULARY, 8, mask_zero=True)(tokens)
    output = keras.layers.Dense(1, activation="sigmoid")(keras.layers.GlobalAveragePooling1D()(embedded))
    model = keras.Model(tokens, output)
    model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
    pairs = train.map(lambda batch: (batch["tokens"], batch["good"]))
    history = model.fit(pairs, epochs=2, shuffle=False, verbose=2)
    return history.history["accuracy"][-1]


if __name__ == "__main__":
    accuracy = main()
    assert accuracy > 0.95, accuracy
    print(f"accuracy {accuracy:.3f}")
