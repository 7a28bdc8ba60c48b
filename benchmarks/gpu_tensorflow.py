"""What gpu.py needs of TensorFlow: a training step, and the ways to feed it."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import tensorflow as tf

LABELS = {
    "tensor": "a tensor on the GPU",
    "penstock": "Penstock, shared memory",
    "generator": "from_generator, .batch, .prefetch",
}
NEEDS = "the driver and tensorflow[and-cuda]"


def sees_gpu() -> bool:
    gpus = tf.config.list_physical_devices("GPU")
    for gpu in gpus:
        tf.config.experimental.set_memory_growth(gpu, True)  # leaves memory for the timed copies
    return bool(gpus)


def step_of(side: int, device: str, *, tiny: bool) -> Callable[[Any], Any]:
    """Return a training step. It takes a batch of images and labels, and returns the loss."""
    keras = tf.keras
    keras.mixed_precision.set_global_policy("mixed_float16")
    if tiny:
        layers = [keras.layers.Conv2D(4, 3, strides=4), keras.layers.Flatten(), keras.layers.Dense(1000)]
        model = keras.Sequential([keras.Input((side, side, 3)), *layers])
    else:
        model = keras.applications.ResNet50(weights=None, input_shape=(side, side, 3), classifier_activation=None)
    optimizer = keras.mixed_precision.LossScaleOptimizer(keras.optimizers.SGD(0.01, momentum=0.9))
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(batch: Any) -> Any:
        images, labels = batch
        with tf.GradientTape() as tape:
            logits = tf.cast(model(tf.cast(images, tf.float16) / 255, training=True), tf.float32)
            loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(labels, logits))
            scaled = optimizer.scale_loss(loss)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(scaled, variables), variables, strict=True))
        return loss

    return step


def sources(
    connect: Callable[[], Any], side: int, batch_size: int, workers: int, device: str
) -> dict[str, Iterator[Any]]:
    """Return the ways to feed, by their names in LABELS."""
    served = iter(connect().dataset())
    return {
        "tensor": _on_device(device, next(served)),
        "penstock": served,
        "generator": iter(_from_generator(side, batch_size)),
    }


def _on_device(device: str, first: tuple[Any, Any]) -> Iterator[Any]:
    """Repeat one batch on the device, without a dataset in between."""
    with tf.device(f"/{device.upper()}:0"):
        batch = tuple(tf.identity(part) for part in first)
    while True:
        yield batch


def _from_generator(side: int, batch_size: int) -> Iterable[Any]:
    """Return a dataset as in TensorFlow's guide: the generator's samples, batched by tf.data."""
    import gpu_feed

    specs = (tf.TensorSpec((side, side, 3), tf.uint8), tf.TensorSpec((), tf.int32))
    return (
        tf.data.Dataset.from_generator(gpu_feed.stream, output_signature=specs)
        .batch(batch_size)
        .prefetch(tf.data.AUTOTUNE)
    )
