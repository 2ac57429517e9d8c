"""Modules that install a device, which must not be imported into pytest's own process to look for doctests."""

collect_ignore = ["python_device.py"]
