"""tep on Ray: searches for bugs spread over a cluster, and a transport for the tensors of actors.

Nothing of Ray is imported before it is asked for; the extra `ray` brings it.
"""
