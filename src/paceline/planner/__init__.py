"""The planner: which strategy, how fast, how much memory, and why, predicted from sizes or from measurements."""
