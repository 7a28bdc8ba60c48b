"""`penstock profile`: samples the stacks of a daemon's workers, and shows where their time goes.

`watching.py` reads the samples, `folding.py` makes stacks of what users know, `profile.py` adds them up, and the other
files show the result. Nothing here runs in the daemon or in a worker; worker/process/stack_sampler.py takes the
samples.
"""
