"""The paper's parameter server: replicas, and the owner of A, as actors of Ray, on this host or on a cluster."""
