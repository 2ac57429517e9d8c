"""Spans: what happened, when, on which worker; recorded, stored and drawn. No torch."""
