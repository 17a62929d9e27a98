"""Decoding with a target that is a pure function of its context, and a network that can be cut."""

import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np

from retriever.client.resilient import ResilientDrafter
from retriever.drafter import Drafter, DraftRequest, TokenIds
from tests.patience import must_hold

_PHRASE = [7, 3, 41, 18, 2, 30, 3, 11, 26, 9, 41, 5, 33, 14, 2, 19, 8, 44, 21]
DEADLINE_S = 0.1
PROMPT = np.array([3, 1, 4, 1, 5, 9, 2, 6] * 4, np.int32)


def next_token(tokens: Sequence[int]) -> int:
    """What the target writes: one phrase over and over, and now and then something else."""
    return _PHRASE[len(tokens) % len(_PHRASE)] + (len(tokens) % 97 == 0)


def plain(num_tokens: int, prompt: TokenIds = PROMPT) -> list[int]:
    """Return what the target writes without any drafts."""
    tokens: list[int] = prompt.tolist()
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(next_token(tokens))
    return tokens


@dataclass
class Decoded:
    """What decoding gave.

    Attributes:
        tokens: prompt and output.
        waits_s: how long each step waited for its draft.
        accepted: drafted tokens that each step accepted.
    """

    tokens: list[int]
    waits_s: list[float] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def decode(
    drafter: Drafter,
    session: str,
    num_tokens: int,
    *,
    on_step: Callable[[int], None] = lambda _: None,
    pause_s: float = 0.0,
) -> Decoded:
    """Decode greedily with drafts, `on_step` before each."""
    done = Decoded(PROMPT.tolist())
    drafter.open(session, PROMPT)
    new: list[int] = []
    while len(done.tokens) < len(PROMPT) + num_tokens:
        on_step(len(done.waits_s))
        request = DraftRequest(session, np.array(new, np.int32), len(done.tokens), 16)
        began = time.monotonic()
        (tree,) = drafter.draft([request])
        done.waits_s.append(time.monotonic() - began)
        written = plain(17, np.array(done.tokens))[len(done.tokens) :]
        path = tree.follow(np.array(written))
        new = written[: min(len(path) + 1, len(PROMPT) + num_tokens - len(done.tokens))]
        done.accepted.append(len(new) - 1)
        done.tokens += new
        time.sleep(pause_s)
    drafter.close(session, np.array(new, np.int32))
    return done


class Proxy:
    """Passes TCP on to an address until it is frozen: then nothing passes, and nothing closes.

    Args:
        target: the address.
        delay_s: how long everything is under way, in seconds.
    """

    def __init__(self, target: str, delay_s: float = 0.0) -> None:
        self._delay_s = delay_s
        self._under_way: deque[tuple[float, socket.socket, bytes]] = deque()
        host, _, port = target.rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._pairs: dict[socket.socket, socket.socket] = {}
        self._passing = threading.Event()
        self._passing.set()
        self._is_closed = self._is_reset = False
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._listener.getsockname()[1]}"

    def freeze(self) -> None:
        self._passing.clear()

    def thaw(self) -> None:
        self._passing.set()

    def reset(self) -> None:
        """Cut all connections at once: both sides are told so, and nothing is passed on before."""
        self._is_reset = True

    def close(self) -> None:
        self._is_closed = True
        self._passing.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            self._passing.wait()
            if self._is_reset:
                self._reset()
            self._pass_on()
            wait_s = 0.001 if self._under_way else 0.02
            ready, _, _ = select.select([self._listener, *self._pairs], [], [], wait_s)
            for each in ready if self._passing.is_set() else []:
                self._serve(each)
        for each in [self._listener, *self._pairs]:
            each.close()

    def _reset(self) -> None:
        self._is_reset = False
        for each in self._pairs:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            each.close()
        self._pairs.clear()
        self._under_way.clear()

    def _pass_on(self) -> None:
        while self._under_way and self._under_way[0][0] <= time.monotonic():
            _, receiver, data = self._under_way.popleft()
            with suppress(OSError):
                receiver.sendall(data)

    def _serve(self, ready: socket.socket) -> None:
        if ready is self._listener:
            client, _ = ready.accept()
            server = socket.create_connection(self._target)
            self._pairs |= {client: server, server: client}
        elif ready in self._pairs:
            with suppress(OSError):
                if data := ready.recv(1 << 16):
                    self._under_way.append(
                        (time.monotonic() + self._delay_s, self._pairs[ready], data)
                    )
                    self._pass_on()
                    return
            other = self._pairs.pop(ready)
            del self._pairs[other]
            ready.close()
            other.close()


@contextmanager
def proxy_to(address: str, delay_s: float = 0.0) -> Iterator[Proxy]:
    """Give a proxy during the block."""
    proxy = Proxy(address, delay_s)
    try:
        yield proxy
    finally:
        proxy.close()


def drafter_on(*addresses: str) -> ResilientDrafter:
    return ResilientDrafter(addresses, deadline_s=DEADLINE_S)


def assert_unharmed(done: Decoded) -> None:
    """The tokens are those of plain decoding, no step waited too long, and drafts were accepted."""
    must_hold(done.tokens == plain(len(done.tokens) - len(PROMPT)), "the output is another one")
    assert max(done.waits_s) < 1.2 * DEADLINE_S
    assert sum(done.accepted) > len(done.tokens) / 2


def wait_until(is_so: Callable[[], bool], timeout_s: float = 60.0) -> bool:
    """Look again and again; tell whether it has become so in time."""
    until = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True
