"""Random scenarios: feeds, services, consumers and faults are drawn from a seed. Each is compared with a plain model.

    make chaos ARGS='--scenarios 2000 --seed 1 --jobs 2'
    make chaos ARGS='--seed 417 --scenarios 1'                  # replays scenario 417

A scenario (scenario.py) is plain data. A run of it (run.py) starts a real daemon (service.py) that serves feeds.py. It
lets real consumers (reading.py) read while it causes the faults, and compares the batches that they were handed with
the guarantees (model.py, compare.py). The model knows nothing of the product's code. Whatever depends on the keyed
permutation is compared with a quiet run: one worker, and no faults.
"""
