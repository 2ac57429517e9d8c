"""Words and arithmetic that every other part uses. No torch."""
