"""The peer: Hugging Face transformers on the same folder, dtype and threads."""

from saguaro.measure.peer import Peer

__all__ = ["Peer"]
