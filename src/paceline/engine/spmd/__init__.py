"""SPMD runtime over torch.distributed: launch, rendezvous, collectives, watchdog, and a rank's part of the model."""
