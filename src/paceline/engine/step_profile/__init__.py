"""Measure the components of a step on this host, each by itself: passes, messages, collectives, copies, updates."""
