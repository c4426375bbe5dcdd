"""A receipt's speed: only what ran while nothing was being compiled, and without the caller's own time."""

from concurrent.futures import Future

from jkv.core import compilation
from jkv.core.compilation import Cost
from jkv.generation.decode_timer import DecodeTimer


class Device:
    """A clock, and blocks that run one after the other on it."""

    def __init__(self):
        self.now, self.free, self.cost = 10.0, 0.0, Cost()
        self.timer = DecodeTimer(self.cost, lambda: self.now)

    def block(self, seconds):
        span, out = self.timer.begin(), Block(self)
        self.free = out.end = max(self.now, self.free) + seconds
        self.timer.dispatched(span, out)
        return span, out

    def read(self, span, out, tokens):
        self.timer.wait(span, out)
        self.timer.take(span, tokens)

    def hold(self, seconds):
        self.now += seconds
        self.timer.held += seconds

    @property
    def counted(self):
        return self.timer.tokens, round(self.timer.seconds, 6)


class Block:
    def __init__(self, device):
        self.device, self.end = device, 0.0

    def is_ready(self):
        return self.device.now >= self.end

    def block_until_ready(self):
        self.device.now = max(self.device.now, self.end)
        return self


def test_blocks_that_run_one_ahead_are_timed_from_end_to_end():
    device = Device()
    blocks = [device.block(0.5), device.block(0.25)]
    for i in range(4):
        device.read(*blocks.pop(0), 16 * (i + 1))
        device.hold(0.001)
        blocks.append(device.block(0.25))
    assert device.counted == (64, 0.5 + 3 * 0.25)


def test_a_block_beside_the_compiler_does_not_count(monkeypatch):
    monkeypatch.setattr(compilation, "BEGUN", begun := {})
    device = Device()
    begun["flush"] = Future()
    slow = device.block(2.0)
    begun.clear()
    device.read(*slow, 16)  # compiled when it began
    slow = device.block(2.0)
    begun["step"] = Future()
    device.read(*slow, 32)  # compiled when it ended
    begun.clear()
    slow = device.block(2.0)
    device.cost.programs += 1
    device.read(*slow, 48)  # its own program was compiled
    device.read(*device.block(0.5), 64)
    assert device.counted == (16, 0.5)


def test_the_time_of_the_caller_does_not_count():
    device = Device()
    first, second = device.block(0.5), device.block(0.5)
    device.read(*first, 16)
    device.hold(3.0)  # the second block ends meanwhile, unseen
    third = device.block(0.5)
    device.read(*second, 32)
    device.read(*third, 48)  # nobody knows when it began
    device.read(*device.block(0.5), 64)
    assert device.counted == (32, 1.0)
