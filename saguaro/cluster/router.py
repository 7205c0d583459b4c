"""Chooses a replica for a request, in Ray Serve's proxies.

A request with the header `x-session-id` goes to the replica of its session, whose prefix cache has the session's text.
Others go to the one of two random replicas that has fewer requests. A proxy does not read bodies, so prompts cannot be
compared here. Replicas on the proxy's own node are not preferred: one proxy may serve all nodes.
"""

import random
from collections.abc import Sequence
from typing import Any

from ray.serve.request_router import FIFOMixin, RequestRouter

from saguaro.cluster.session import replica_of


class SessionRouter(FIFOMixin, RequestRouter):  # type: ignore[misc]  # Any where ray is not installed
    """Routes by session, else by load."""

    async def choose_replicas(self, candidate_replicas: Sequence[Any], pending_request: Any = None) -> list[list[Any]]:
        """Groups of replicas, the most wanted first; of a group the one with the fewest requests is asked."""
        if not candidate_replicas:
            return []
        two = random.sample(list(candidate_replicas), min(2, len(candidate_replicas)))
        if pending_request is None:
            return [two]
        pending_request.routing_context.should_backoff = True  # pause if all of these are full
        session = pending_request.metadata.session_id
        if not session:
            return [two]
        home = replica_of(session, [one.replica_id.unique_id for one in candidate_replicas])
        return [[one for one in candidate_replicas if one.replica_id.unique_id == home], two]
