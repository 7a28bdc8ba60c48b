"""A local connection of the daemon: the last messages of the other side arrive, however that side ended."""

from __future__ import annotations

import asyncio
import socket

import pytest
import uvloop

from penstock_proto.transport import seqpacket
from penstock_server.net.peer import Peer

uvloop.new_event_loop().close()  # the first loop opens a pipe that stays


@pytest.mark.parametrize("unread", [False, True])
def test_what_was_said_before_the_end_is_heard_also_of_who_left_messages_unread(unread: bool) -> None:
    async def listen() -> tuple[list[bytes], int]:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        heard: list[bytes] = []
        ended = asyncio.Event()
        peer = Peer(ours, lambda data, fd: heard.append(data), ended.set)
        if unread:
            peer.send(b"nobody reads this")
        for number in range(40):
            seqpacket.send(theirs, b"%d" % number)
        theirs.close()
        await asyncio.wait_for(ended.wait(), 10)
        return heard, ours.fileno()

    heard, fd = uvloop.run(listen())
    assert heard == [b"%d" % number for number in range(40)]
    assert fd == -1


def test_it_says_whether_messages_still_wait_on_this_side() -> None:
    async def send() -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        peer = Peer(ours, lambda data, fd: None, lambda: None)
        theirs.setblocking(False)
        sent = 0
        while not peer.unsent:
            peer.send(bytes(1000))
            sent += 1
        for _ in range(sent):
            await asyncio.sleep(0)
            await asyncio.get_running_loop().sock_recv(theirs, 1000)
        assert not peer.unsent
        peer.close()
        theirs.close()

    uvloop.run(send())
