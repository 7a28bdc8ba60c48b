"""The `rng` of a transform is that of `seeds`, also where the generators of many samples are made at once."""

from __future__ import annotations

import pickle

import numpy as np

from penstock_server.worker.isolation.randomness import seeds
from penstock_server.worker.isolation.sample_generators import SampleGenerators

IN_TURN = [*range(100)]
JUMPING = [3, 4, 5, 4, 3, 1000, 1002, 1003, 1004, 1003, 1002, 1001, 990, *range(990, 1040), 0]


def test_each_sample_has_the_generator_of_its_seeds_in_whatever_order_samples_come() -> None:
    for seed in (0, 2**63):
        generators = SampleGenerators("transform rng", seed)
        for epoch, split in ((0, 0), (0, 2**40), (3, 2**40)):
            for number in [*IN_TURN, *JUMPING]:
                found = generators.of(epoch, split, number).bit_generator
                expected = np.random.PCG64(seeds("transform rng", seed, epoch, split, number))
                assert found.state == expected.state, (seed, epoch, split, number)


def test_generators_that_are_derived_from_one_are_those_that_numpy_derives() -> None:
    generators = SampleGenerators("transform rng", 1)
    for number in (0, 1, 2, 2, 1):
        found = generators.of(0, 0, number)
        expected = np.random.default_rng(seeds("transform rng", 1, 0, 0, number))
        for _ in range(2):
            children = [generator.spawn(2)[1] for generator in (found, expected)]
            assert children[0].random() == children[1].random()
        copies = [pickle.loads(pickle.dumps(generator)) for generator in (found, expected)]
        assert copies[0].random() == copies[1].random()
        assert copies[0].spawn(1)[0].random() == copies[1].spawn(1)[0].random()
        sequences = [generator.bit_generator.seed_seq for generator in (found, expected)]
        assert sequences[0].generate_state(7).tolist() == sequences[1].generate_state(7).tolist()
        assert sequences[0].entropy == sequences[1].entropy
        assert sequences[0].n_children_spawned == sequences[1].n_children_spawned == 4
