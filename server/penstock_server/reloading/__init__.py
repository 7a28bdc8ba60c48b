"""`penstock serve --reload`: the next epoch is read from changed code.

A stream is a function of the feed, so an epoch is read to its end with the code that it began with. The daemon looks
for changes every second. It tries new code in another process; if it cannot be served, the old code goes on. Otherwise
the daemon drains as soon as a consumer begins another epoch, or at once if none reads one, and another daemon takes its
place in the same process, at the same address. Consumers reconnect by themselves, as after any restart.
"""
