"""The best arrangements: enumerated, bounded, ranked by closed forms, simulated."""
