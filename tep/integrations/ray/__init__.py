"""tep on Ray: searches for bugs spread over a cluster.

Nothing of Ray is imported before it is asked for; the extra `ray` brings it.
"""
