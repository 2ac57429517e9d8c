"""The command ``python -m paceline.plan.predict`` alone; the planner is :mod:`paceline.planner`."""
