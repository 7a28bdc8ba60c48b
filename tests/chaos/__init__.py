"""Random scenarios: feeds, services, consumers and faults drawn from a seed, each compared with a plain model.

    make chaos ARGS='--scenarios 2000 --seed 1 --jobs 2'
    make chaos ARGS='--seed 417 --scenarios 1'                  # replays scenario 417

A scenario (scenario.py) is plain data. One run of it (run.py) starts a real daemon (service.py) that serves feeds.py,
lets real consumers (reading.py) read while it brings about the faults, and compares what they were handed with what
the guarantees promise (model.py, compare.py), which knows nothing of the product's code. What the keyed permutation
decides is compared with a quiet run of one worker.
"""
