"""The place of the command ``python -m paceline.plan.predict``; the planner is :mod:`paceline.planner`."""
