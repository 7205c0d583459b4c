"""The rounds of an output, in the format of `return_speculation`."""

from collections.abc import Sequence
from typing import Any

from saguaro.engine.engine import CONTEXT
from saguaro.model.tokenizer import TextStream, Tokenizer
from saguaro.serve.front import Piece
from saguaro.types import Interval, RowEvent


class Narrator:
    """Reports the rounds of one output. A character belongs to the token that completes it."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int], arrived: float) -> None:
        self._stream = TextStream(tokenizer, context=prompt[-CONTEXT:])
        self._arrived = arrived

    def tell(self, piece: Piece) -> list[dict[str, Any]]:
        """The round of a piece; empty if no round made it."""
        if piece.round is None:
            return []
        event, row = piece.round
        delta, drafted = piece.delta, self._drafted(row)
        origins = [row.source] * delta.n_accepted + ["target"] * (len(delta.token_ids) - delta.n_accepted)
        tokens = [
            {"id": token, "text": self._stream.push(token), "origin": origin}
            for token, origin in zip(delta.token_ids, origins, strict=True)
        ]
        draft = None
        if event.draft is not None and row.room > 0:
            is_prepared = event.draft.is_prepared and row.prepares
            prepare = self._since(event.draft.prepare) if is_prepared else None
            draft = {"respond": self._since(event.draft.respond), "prepare": prepare}
        return [
            {
                "round": event.number,
                "drafted": drafted,
                "accepted": delta.n_accepted,
                "source": row.source,
                "hit": row.source == "cache" if row.length else None,
                "tokens": tokens,
                "verify": self._since(event.verify or event.launch),
                "draft": draft,
            }
        ]

    def _drafted(self, row: RowEvent) -> list[dict[str, Any]]:
        """The speculated tokens, each with its text after its parent; of trees with the parent."""
        streams = {-1: self._stream}
        drafted = []
        for node, token in enumerate(row.drafted):
            parent = row.parents[node] if row.parents else node - 1
            streams[node] = streams[parent].fork()
            drafted.append({"id": token, "text": streams[node].push(token)})
            if row.parents:
                drafted[-1] |= {"parent": parent, "accepted": node in row.path}
        return drafted

    def _since(self, interval: Interval) -> list[float]:
        return [round(at - self._arrived, 6) for at in interval]
