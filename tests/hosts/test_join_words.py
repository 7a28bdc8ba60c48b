"""What `penstock join` says about its head."""

from __future__ import annotations

import asyncio

from penstock_server.join.agent import Agent
from penstock_server.join.config import JoinConfig


def test_the_url_of_a_head_has_brackets_around_an_ipv6_address() -> None:
    async def gone() -> str:
        agent = Agent(JoinConfig(feeds=("feeds.py:feed",), head=("::1", 9), workers=1))
        error = agent._gone(OSError("refused"))
        await agent._supervisor.stop(b"", patience=0.0)
        agent._listeners.close()
        return error.message

    assert "the head at tcp://[::1]:9 does not answer" in asyncio.run(gone())
