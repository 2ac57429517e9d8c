"""One process, a discrete-event clock: gradients are real, time is simulated."""
