"""Streams and events of the fake device: the order in which its work is done, and none of the work.

The vector clocks are those of torch's CUDA sanitizer (`torch.cuda._sanitizer`), which follows real streams. The host is
one more stream: work of a stream comes after all that the host did before it submitted the work.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch.cuda._sanitizer import DEFAULT_STREAM_ID, StreamSynchronizations

HOST = -1
"""Number of the host, as a stream."""


class Submitted(NamedTuple):
    """A piece of work: the number of its stream, and its own number among all work."""

    stream: int
    number: int


class Order:
    """The order of all work on a device, by streams and events."""

    def __init__(self) -> None:
        self._clocks = StreamSynchronizations()
        self._work, self._names = itertools.count(1), itertools.count(1)
        self._of_groups: dict[Hashable, int] = {}
        self._thread = threading.local()
        self._clocks.update_seq_num(HOST, 0)

    @property
    def current(self) -> int:
        """Number of the stream that is current in this thread; a new thread begins with the default stream."""
        return getattr(self._thread, "current", DEFAULT_STREAM_ID)

    @current.setter
    def current(self, stream: int) -> None:
        self._thread.current = stream

    def new_name(self) -> int:
        """Returns a number for a new stream or event."""
        return next(self._names)

    def stream_of(self, group: Hashable) -> int:
        """Returns the stream on which NCCL runs asynchronous collectives of a process group."""
        return self._of_groups.setdefault(group, self.new_name())

    def submit(self, stream: int) -> Submitted:
        """Submits a piece of work to a stream, or executes one on the host."""
        moment = Submitted(stream, next(self._work))
        self._clocks.update_seq_num(*moment)
        self._clocks.current_sync_states[stream][HOST] = moment.number
        return moment

    def record(self, event: int, stream: int) -> None:
        """Records an event on a stream."""
        self._clocks.create_event(event)
        self._clocks.record_state(event, stream)

    def wait(self, stream: int, event: int) -> None:
        """Makes a stream (or the host, and so all streams) wait for an event; for an event never recorded, nothing."""
        if stream == HOST:
            self._clocks.all_streams_wait_for_event(event)
        else:
            self._clocks.stream_wait_for_event(stream, event)

    def join(self, stream: int, other: int) -> None:
        """Makes a stream (or the host, and so all streams) wait for all work of another stream."""
        event = self.new_name()
        self.record(event, other)
        self.wait(stream, event)
        self._clocks.delete_event(event)

    def forget(self, event: int) -> None:
        """Forgets an event."""
        self._clocks.recorded_sync_states.pop(event, None)

    def synchronize(self) -> None:
        """Makes the host wait for all streams."""
        self._clocks.sync_all_streams()

    def follows(self, stream: int, moment: Submitted) -> bool:
        """Whether the next work of a stream comes after a piece of work."""
        return self._clocks.is_ordered_after(stream, moment.number, moment.stream)


ORDER = Order()
"""The order of the work of this process's one device."""


class FakeStream:
    """Replacement of `torch.cuda.Stream`."""

    device_index, device_type = 0, 1
    device = torch.device("cuda", 0)

    def __init__(self, *_args: Any, number: int | None = None, **_kwargs: Any) -> None:
        self.stream_id = self.cuda_stream = ORDER.new_name() if number is None else number
        self._before: list[int] = []

    def wait_stream(self, stream: Any) -> None:
        """Makes later work wait for a stream's present work."""
        ORDER.join(self.stream_id, stream.stream_id)

    def wait_event(self, event: Any) -> None:
        """Makes later work wait for an event."""
        ORDER.wait(self.stream_id, event.number)

    def synchronize(self) -> None:
        """Makes the host wait for the stream."""
        ORDER.join(HOST, self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        """Records the event, or a new one, and returns it."""
        event = event or FakeEvent()
        event.record(self)
        return event

    def query(self) -> bool:
        """Whether all work is done."""
        return True

    def is_capturing(self) -> bool:
        """Whether a CUDA graph is being made."""
        return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, FakeStream) and self.stream_id == other.stream_id

    def __hash__(self) -> int:
        return hash(self.stream_id)

    def __enter__(self) -> FakeStream:
        self._before.append(ORDER.current)
        ORDER.current = self.stream_id
        return self

    def __exit__(self, *_error: object) -> None:
        ORDER.current = self._before.pop()


class FakeEvent:
    """Replacement of `torch.cuda.Event`."""

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        self.number = ORDER.new_name()

    def record(self, stream: Any = None) -> None:
        """Records the event on a stream, by default the current one."""
        ORDER.record(self.number, ORDER.current if stream is None else stream.stream_id)

    def wait(self, stream: Any = None) -> None:
        """Makes a stream's later work wait for the event; by default the current stream's."""
        ORDER.wait(ORDER.current if stream is None else stream.stream_id, self.number)

    def synchronize(self) -> None:
        """Makes the host wait for the event."""
        ORDER.wait(HOST, self.number)

    def query(self) -> bool:
        """Whether the event has happened."""
        return True

    def elapsed_time(self, _other: Any) -> float:
        """Milliseconds between two events: always 0."""
        return 0.0

    def __del__(self) -> None:
        ORDER.forget(self.number)


def current_stream(*_device: Any) -> FakeStream:
    """Replaces `torch.cuda.current_stream`."""
    return FakeStream(number=ORDER.current)


def within_stream(stream: FakeStream | None) -> FakeStream:
    """Replaces `torch.cuda.stream`, a context."""
    return FakeStream(number=ORDER.current if stream is None else stream.stream_id)


def set_stream(stream: FakeStream) -> None:
    """Replaces `torch.cuda.set_stream`."""
    ORDER.current = stream.stream_id
