"""The other end of a link, and where one comes from: a child process, or a connection to another machine."""

from typing import Protocol

from saguaro.config import DraftConfig
from saguaro.link.channel import Channel
from saguaro.types import DraftTimes, Interval


class Peer(Protocol):
    """One draft elsewhere, from its start or the first attempt to reach it to its end. No method blocks."""

    @property
    def channel(self) -> Channel | None:
        """Messages to and from it, the settings first; None: it was not reached yet."""

    @property
    def pid(self) -> int | None:
        """Its process id, if it is a process of this machine."""

    @property
    def is_given_up(self) -> bool:
        """Whether it was given up."""

    def reach(self) -> Channel | None:
        """The channel; None: not yet. Raises DraftError if it cannot be reached."""

    def give_up(self, why: Exception) -> None:
        """Give it up."""

    def is_gone(self) -> bool:
        """Whether it has ended, after it was given up."""

    def why_ended(self) -> str:
        """Why it ended."""

    def local(self, times: DraftTimes, exchange: Interval) -> DraftTimes:
        """The times of a reply by this process's clock; the exchange lasted from request to reply."""

    def close(self) -> None:
        """End it and release everything."""


class Peers(Protocol):
    """Starts or reaches drafts, one after the other."""

    @property
    def name(self) -> str:
        """The draft, for messages."""

    @property
    def verbs(self) -> tuple[str, str]:
        """What cannot be done, and what is done again, for messages."""

    def open(self, config: DraftConfig) -> Peer:
        """Start or dial the next one without waiting for it. Raises OSError if that fails."""
