"""A Ray cluster of two nodes on this machine, in a process of its own: it prints its address, and loses its second node
when it reads `lose`. It ends at the end of its input."""

import os
import sys
import tempfile

LEAN = {"include_dashboard": False, "include_log_monitor": False, "no_monitor": True}


def main() -> None:
    """Run until the input ends. A node has a CPU: there is one replica on each."""
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, **LEAN})
    other = cluster.add_node(num_cpus=1)
    print(cluster.address, flush=True)
    for line in sys.stdin:
        if line.strip() == "lose":
            cluster.remove_node(other, allow_graceful=False)
            print("lost", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    assert os.environ["RAY_AUTH_MODE"] == "token", "the nodes can be reached by other machines"
    with tempfile.TemporaryDirectory(prefix="ray-") as folder:  # other clusters of this machine are not touched
        os.environ.update(RAY_TMPDIR=folder, RAY_USAGE_STATS_ENABLED="0", RAY_enable_metrics_collection="0")
        main()
