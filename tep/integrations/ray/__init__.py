"""tep on Ray: searches for bugs spread over a cluster, and a transport for the tensors of actors.

Nothing of Ray is imported before its use; the extra `ray` installs it.
"""
