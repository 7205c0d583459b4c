"""The peer: Hugging Face transformers on the same folder, dtype and threads."""

from saguaro.serve.peer import Peer

__all__ = ["Peer"]
